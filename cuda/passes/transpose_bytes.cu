// Transposes bytes: see transpose_bytes.h. A block transposes 128 x 128 bytes in shared memory. It
// reads vectors of 16 bytes along a row, and writes such vectors along a column.
//
//   memory -> registers -> shared memory | barrier | 16 words of a column of words -> 4 x 4 bytes
//   transposed in registers -> memory

#include "passes/transpose_bytes.h"

#include <limits>

#include "common/ceil_div.h"
#include "common/fast_divisor.h"
#include "common/turn_bytes.cuh"
#include "ptx/global_memory.cuh"

namespace jax_tcgemm {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = 128;
constexpr int kVector = 16;
constexpr int kRowVectors = kTile / kVector;

struct TransposeLaunch {
  TransposeProblem problem;
  FastDivisor tiles_across;  // along columns
  FastDivisor tiles;         // of a matrix
};

// Loads 16 bytes of a row, of which `left` exist; the rest are zeros.
__device__ __forceinline__ void load_bytes(uint32_t (&word)[4], const uint8_t* from, int left) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    word[i] = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (4 * i + j < left) word[i] |= uint32_t{from[4 * i + j]} << 8 * j;
    }
  }
}

// Returns the place of a vector of a row. Vectors trade places by the row's group of 16, so that
// neither rows nor columns of words have bank conflicts.
__device__ __forceinline__ int vector_at(int row, int vector) {
  return row * kRowVectors + (vector ^ row / kVector);
}

// Loads a tile. With kAligned, rows begin on multiples of 16 bytes.
template <bool kAligned>
__device__ __forceinline__ void load_tile(uint4* tile, const TransposeProblem& p, const uint8_t* in,
                                          int row0, int column0) {
#pragma unroll
  for (int i = 0; i < kTile * kRowVectors / kThreads; ++i) {
    const int index = threadIdx.x + i * kThreads;
    const int row = index / kRowVectors;
    const int vector = index % kRowVectors;
    const int left = row0 + row < p.rows ? p.columns - column0 - vector * kVector : 0;
    const uint8_t* from = in + int64_t{row0 + row} * p.in_ld + column0 + vector * kVector;
    uint32_t word[4];
    if (kAligned && (left >= kVector || left <= 0)) {
      ptx::load_global_16_if(word, reinterpret_cast<uint64_t>(from), left > 0);
    } else {
      load_bytes(word, from, left);
    }
    tile[vector_at(row, vector)] = {word[0], word[1], word[2], word[3]};
  }
}

// Stores a transposed tile. Eight neighbouring lanes write a line of 128 bytes.
__device__ __forceinline__ void store_tile(const uint32_t* tile, const TransposeProblem& p,
                                           uint8_t* out, int row0, int column0) {
  const int group = threadIdx.x % kRowVectors;   // of 16 rows
  const int column = threadIdx.x / kRowVectors;  // of words
  const int row = row0 + group * kVector;
  uint32_t turned[4][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t in[4], out_words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int at = vector_at(group * kVector + 4 * i + j, column / 4);
      in[j] = tile[4 * at + column % 4];
    }
    turn_bytes(out_words, in);
#pragma unroll
    for (int j = 0; j < 4; ++j) turned[j][i] = out_words[j];
  }
  if (row >= p.out_ld) return;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int to = column0 + 4 * column + j;
    if (to < p.columns) {
      *reinterpret_cast<uint4*>(out + int64_t{to} * p.out_ld + row) = {turned[j][0], turned[j][1],
                                                                       turned[j][2], turned[j][3]};
    }
  }
}

template <bool kAligned>
__global__ void __launch_bounds__(kThreads)
    transpose_kernel(const __grid_constant__ TransposeLaunch launch) {
  __shared__ uint4 tile[kTile * kRowVectors];
  const TransposeProblem& p = launch.problem;
  const int batch = launch.tiles.divide(blockIdx.x);
  const int rest = blockIdx.x - batch * launch.tiles.divisor;
  const int down = launch.tiles_across.divide(rest);
  const int row0 = down * kTile;
  const int column0 = (rest - down * launch.tiles_across.divisor) * kTile;
  load_tile<kAligned>(tile, p, static_cast<const uint8_t*>(p.in) + batch * p.in_batch_stride, row0,
                      column0);
  __syncthreads();
  store_tile(reinterpret_cast<const uint32_t*>(tile), p,
             static_cast<uint8_t*>(p.out) + int64_t{batch} * p.columns * p.out_ld, row0, column0);
}

}  // namespace

cudaError_t launch_transpose(const TransposeProblem& problem, cudaStream_t stream) {
  const int64_t across = ceil_div(problem.columns, kTile);
  const int64_t tiles = across * ceil_div(problem.out_ld, kTile);
  if (tiles * problem.batch > std::numeric_limits<int32_t>::max()) {
    return cudaErrorInvalidConfiguration;
  }
  TransposeLaunch launch = {problem, make_fast_divisor(static_cast<int32_t>(across)),
                            make_fast_divisor(static_cast<int32_t>(tiles))};
  cudaLaunchConfig_t grid = {};
  grid.gridDim = dim3(static_cast<unsigned>(tiles * problem.batch));
  grid.blockDim = dim3(kThreads);
  grid.stream = stream;
  const bool aligned = reinterpret_cast<uintptr_t>(problem.in) % kVector == 0 &&
                       problem.in_ld % kVector == 0 && problem.in_batch_stride % kVector == 0;
  return aligned ? cudaLaunchKernelEx(&grid, transpose_kernel<true>, launch)
                 : cudaLaunchKernelEx(&grid, transpose_kernel<false>, launch);
}

}  // namespace jax_tcgemm
