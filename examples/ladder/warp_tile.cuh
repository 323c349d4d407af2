// A block's tile for tensor cores: 8 warps of 64 x 32 compute 128 x 128 of D, 128 bytes of k at a
// time.
//
// Shared memory holds A in rows of k and B in rows of n, like global memory. 16-byte chunks of a
// row are XORed with the row's number, so that copies, ldmatrix and single words all meet 32 banks.
// The number is row % 8 for A and for a 16-bit B, and 2 * (row % 4) for a 32-bit B.

#pragma once

#include <stdint.h>

#include "ladder.h"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/shared_memory.cuh"
#include "vectors.cuh"

namespace ladder {

constexpr int kTile = 128;
constexpr int kThreads = 256;
constexpr int kOperandBytes = kTile * 128;
constexpr int kStageBytes = 2 * kOperandBytes;
// chunks that a thread copies of each operand
constexpr int kChunks = kOperandBytes / 16 / kThreads;

template <typename T>
struct Stage {
  static constexpr int kTileK = 128 / sizeof(T);
  static constexpr int kWidth = 16 / sizeof(T);  // elements of a chunk
  static constexpr int kRowChunksB = kTile / kWidth;

  static __device__ int a_offset(int row, int chunk) { return row * 128 + (chunk ^ row % 8) * 16; }
  static __device__ int b_offset(int k, int chunk) {
    const int turn = sizeof(T) == 2 ? k % 8 : 2 * (k % 4);
    return (k * kRowChunksB + (chunk ^ turn)) * 16;
  }

  // Calls copy(index, offset in the stage, source) for this thread's chunks.
  template <typename Copy>
  static __device__ __forceinline__ void for_each_chunk(const Product<T>& p, int first,
                                                        Copy&& copy) {
    const int row = threadIdx.x / 8, a_chunk = threadIdx.x % 8;
    const int k = threadIdx.x / kRowChunksB, b_chunk = threadIdx.x % kRowChunksB;
    const T* const a = p.a + size_t(blockIdx.y * kTile + row) * p.k + first + a_chunk * kWidth;
    const T* const b = p.b + size_t(first + k) * p.n + blockIdx.x * kTile + b_chunk * kWidth;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      constexpr int kRows = kThreads / 8, kDepth = kThreads / kRowChunksB;
      copy(2 * i, a_offset(row + i * kRows, a_chunk), a + size_t(i * kRows) * p.k);
      copy(2 * i + 1, kOperandBytes + b_offset(k + i * kDepth, b_chunk),
           b + size_t(i * kDepth) * p.n);
    }
  }
};

// The sums of a warp, and the warp's work on a stage.
template <typename T>
struct WarpTile {
  static constexpr jax_tcgemm::Algorithm kAlgorithm =
      sizeof(T) == 2 ? jax_tcgemm::Algorithm::kBf16Bf16F32 : jax_tcgemm::Algorithm::kTf32Tf32F32;
  using Mma = jax_tcgemm::ptx::MmaSync<kAlgorithm>;
  static constexpr int kSteps = 4;    // of 32 bytes of k: 16 or 8 elements
  static constexpr int kRows = 4;     // of 16
  static constexpr int kColumns = 4;  // of 8

  const int lane = threadIdx.x % 32;
  const int first_row = threadIdx.x / 128 * 64;
  const int first_column = threadIdx.x / 32 % 4 * 32;
  float sum[kRows][kColumns][4] = {};

  __device__ __forceinline__ void multiply(uint32_t stage) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t a[kRows][4], b[kColumns][2];
#pragma unroll
      for (int i = 0; i < kRows; ++i) read_a(a[i], stage, first_row + 16 * i, step);
#pragma unroll
      for (int j = 0; j < kColumns; j += 2) {
        read_b(b[j], b[j + 1], stage + kOperandBytes, first_column + 8 * j, step);
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) Mma::run(sum[i][j], a[i], b[j]);
      }
    }
  }

  // Reads 16 rows by 32 bytes of k.
  __device__ __forceinline__ void read_a(uint32_t (&a)[4], uint32_t from, int row, int step) const {
    jax_tcgemm::ptx::ldmatrix_x4(a,
                                 from + Stage<T>::a_offset(row + lane % 16, 2 * step + lane / 16));
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (uint32_t& value : a) jax_tcgemm::ptx::round_to_tf32(value);
    }
  }

  // Reads 32 bytes of k by two times 8 columns. ldmatrix transposes only 16-bit elements.
  __device__ __forceinline__ void read_b(uint32_t (&left)[2], uint32_t (&right)[2], uint32_t from,
                                         int column, int step) const {
    if constexpr (sizeof(T) == 2) {
      uint32_t b[4];
      const int chunk = column / Stage<T>::kWidth + lane / 16;
      jax_tcgemm::ptx::ldmatrix_x4_trans(b,
                                         from + Stage<T>::b_offset(16 * step + lane % 16, chunk));
      left[0] = b[0], left[1] = b[1], right[0] = b[2], right[1] = b[3];
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        left[half] = read_word(from, 8 * step + lane % 4 + 4 * half, column + lane / 4);
        right[half] = read_word(from, 8 * step + lane % 4 + 4 * half, column + 8 + lane / 4);
      }
    }
  }

  __device__ __forceinline__ uint32_t read_word(uint32_t from, int k, int column) const {
    uint32_t value =
        jax_tcgemm::ptx::load_shared_4(from + Stage<T>::b_offset(k, column / 4) + column % 4 * 4);
    jax_tcgemm::ptx::round_to_tf32(value);
    return value;
  }

  __device__ __forceinline__ void store(const Product<T>& p) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = blockIdx.y * kTile + first_row + 16 * i + 8 * half + lane / 4;
        T* d = p.d + size_t(row) * p.n + blockIdx.x * kTile + first_column + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          write_2(d + 8 * j, sum[i][j][2 * half], sum[i][j][2 * half + 1]);
        }
      }
    }
  }
};

}  // namespace ladder
