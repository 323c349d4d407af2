// New: accesses of 128 bits, and two buffers.
//
// A thread loads 16 bytes at a time from global memory and reads four elements at a time from
// shared memory. A is therefore transposed in shared memory. While the block multiplies one buffer,
// the next tile comes into registers and from there into the other buffer. This hides the loads'
// latency, and one __syncthreads a tile suffices.
//
// Ceiling: bank conflicts. Four of a warp's stores of A meet at each bank (two for bfloat16). The
// warp's reads of B, 32 bytes apart, take two turns.

#include "ladder.h"
#include "vectors.cuh"

namespace ladder {
namespace {

constexpr int kTile = 128;
constexpr int kTileK = 16;
constexpr int kSide = 16;             // threads along each side of the tile
constexpr int kEach = kTile / kSide;  // elements of a thread along a side
constexpr int kThreads = kSide * kSide;

struct Buffers {
  float a[kTileK][kTile];
  float b[kTileK][kTile];
};

// A thread's share of the tiles of A and of B: 8 elements of each.
template <typename T>
struct Share {
  static constexpr int kWidth = 16 / sizeof(T);  // elements of a vector
  static constexpr int kCount = kTile * kTileK / kWidth / kThreads;
  Vector<T> a[kCount], b[kCount];

  static __device__ int a_row(int i) { return (threadIdx.x + i * kThreads) / (kTileK / kWidth); }
  static __device__ int a_k(int i) { return threadIdx.x % (kTileK / kWidth) * kWidth; }
  static __device__ int b_k(int i) { return (threadIdx.x + i * kThreads) / (kTile / kWidth); }
  static __device__ int b_column(int i) { return threadIdx.x % (kTile / kWidth) * kWidth; }

  __device__ void load(const Product<T>& p, int first) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      a[i].load(p.a + size_t(blockIdx.y * kTile + a_row(i)) * p.k + first + a_k(i));
      b[i].load(p.b + size_t(first + b_k(i)) * p.n + blockIdx.x * kTile + b_column(i));
    }
  }

  __device__ void store(Buffers& to) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        to.a[a_k(i) + j][a_row(i)] = a[i][j];
      }
#pragma unroll
      for (int j = 0; j < kWidth; j += 4) {
        const float four[] = {b[i][j], b[i][j + 1], b[i][j + 2], b[i][j + 3]};
        write_4(&to.b[b_k(i)][b_column(i) + j], four);
      }
    }
  }
};

template <typename T>
__global__ void __launch_bounds__(kThreads) kernel(Product<T> p) {
  __shared__ __align__(16) Buffers buffers[2];
  const int thread_row = threadIdx.x / kSide * kEach;
  const int thread_column = threadIdx.x % kSide * kEach;
  float sum[kEach][kEach] = {};
  Share<T> share;
  share.load(p, 0);
  share.store(buffers[0]);
  __syncthreads();
  for (int first = 0, now = 0; first < p.k; first += kTileK, now ^= 1) {
    const bool more = first + kTileK < p.k;
    if (more) share.load(p, first + kTileK);
    const Buffers& from = buffers[now];
#pragma unroll
    for (int k = 0; k < kTileK; ++k) {
      float a_part[kEach], b_part[kEach];
#pragma unroll
      for (int i = 0; i < kEach; i += 4) {
        read_4(a_part + i, &from.a[k][thread_row + i]);
        read_4(b_part + i, &from.b[k][thread_column + i]);
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) sum[i][j] += a_part[i] * b_part[j];
      }
    }
    if (more) share.store(buffers[now ^ 1]);
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    T* d = p.d + size_t(blockIdx.y * kTile + thread_row + i) * p.n + blockIdx.x * kTile;
#pragma unroll
    for (int j = 0; j < kEach; j += 4) write_4(d + thread_column + j, sum[i] + j);
  }
}

}  // namespace

template <typename T>
cudaError_t vectors(const Product<T>& p) {
  kernel<<<dim3(p.n / kTile, p.m / kTile), kThreads, 0, p.stream>>>(p);
  return cudaGetLastError();
}

LADDER_INSTANTIATE(vectors)

}  // namespace ladder
