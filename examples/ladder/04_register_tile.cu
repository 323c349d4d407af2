// New: a thread computes 8 x 8 elements of D, a block 128 x 128.
//
// For each k a thread reads 8 elements of A and 8 of B and multiplies 64 times: four
// multiplications a read instead of half of one. The sums stay in registers, so the compiler must
// know the indices of `sum`: all loops over it are unrolled. A thread's rows and columns lie 16
// apart, so that neighbouring threads access neighbours, both in shared memory and in D.
//
// Ceiling: instructions other than multiplications: scalar loads, stores, addresses.

#include "ladder.h"

namespace ladder {
namespace {

constexpr int kTile = 128;
constexpr int kTileK = 16;
constexpr int kSide = 16;             // threads along each side of the tile
constexpr int kEach = kTile / kSide;  // elements of a thread along a side
constexpr int kThreads = kSide * kSide;

template <typename T>
__global__ void __launch_bounds__(kThreads) kernel(Product<T> p) {
  __shared__ float a_tile[kTile][kTileK];
  __shared__ float b_tile[kTileK][kTile];
  const int thread_row = threadIdx.x / kSide;
  const int thread_column = threadIdx.x % kSide;
  const T* a = p.a + size_t(blockIdx.y) * kTile * p.k;
  const T* b = p.b + size_t(blockIdx.x) * kTile;
  float sum[kEach][kEach] = {};
  for (int first = 0; first < p.k; first += kTileK) {
#pragma unroll
    for (int i = threadIdx.x; i < kTile * kTileK; i += kThreads) {
      const int row = i / kTileK, k = i % kTileK;
      a_tile[row][k] = float(a[size_t(row) * p.k + first + k]);
    }
#pragma unroll
    for (int i = threadIdx.x; i < kTileK * kTile; i += kThreads) {
      const int k = i / kTile, column = i % kTile;
      b_tile[k][column] = float(b[size_t(first + k) * p.n + column]);
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kTileK; ++k) {
      float a_part[kEach], b_part[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) a_part[i] = a_tile[thread_row + i * kSide][k];
#pragma unroll
      for (int j = 0; j < kEach; ++j) b_part[j] = b_tile[k][thread_column + j * kSide];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) sum[i][j] += a_part[i] * b_part[j];
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int row = blockIdx.y * kTile + thread_row + i * kSide;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int column = blockIdx.x * kTile + thread_column + j * kSide;
      p.d[size_t(row) * p.n + column] = T(sum[i][j]);
    }
  }
}

}  // namespace

template <typename T>
cudaError_t register_tile(const Product<T>& p) {
  kernel<<<dim3(p.n / kTile, p.m / kTile), kThreads, 0, p.stream>>>(p);
  return cudaGetLastError();
}

LADDER_INSTANTIATE(register_tile)

}  // namespace ladder
