// New: a block keeps a tile of A and one of B in shared memory.
//
// The block's 1024 threads load 32 x 32 elements of each operand once and read them 32 times, so L2
// delivers a 32nd of the bytes. __syncthreads is needed twice: before the tile is read, and before
// it is overwritten.
//
// Ceiling: shared memory. Each multiplication still needs two reads.

#include "ladder.h"

namespace ladder {
namespace {

constexpr int kTile = 32;

template <typename T>
__global__ void __launch_bounds__(kTile* kTile) kernel(Product<T> p) {
  __shared__ float a_tile[kTile][kTile];
  __shared__ float b_tile[kTile][kTile];
  const int row = blockIdx.y * kTile + threadIdx.y;
  const int column = blockIdx.x * kTile + threadIdx.x;
  float sum = 0.f;
  for (int first = 0; first < p.k; first += kTile) {
    a_tile[threadIdx.y][threadIdx.x] = float(p.a[size_t(row) * p.k + first + threadIdx.x]);
    b_tile[threadIdx.y][threadIdx.x] = float(p.b[size_t(first + threadIdx.y) * p.n + column]);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kTile; ++i) sum += a_tile[threadIdx.y][i] * b_tile[i][threadIdx.x];
    __syncthreads();
  }
  p.d[size_t(row) * p.n + column] = T(sum);
}

}  // namespace

template <typename T>
cudaError_t shared_tile(const Product<T>& p) {
  kernel<<<dim3(p.n / kTile, p.m / kTile), dim3(kTile, kTile), 0, p.stream>>>(p);
  return cudaGetLastError();
}

LADDER_INSTANTIATE(shared_tile)

}  // namespace ladder
