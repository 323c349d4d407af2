// The products of sm90/streamed_kernel.cuh: one warp's part of a stage goes from shared memory
// through registers, where the warp transposes 4 x 4 bytes of B.
//
// A warp has 32 of a stage's 128 k. Let lane = 4 g + t. A thread has rows t, 4 + t, 8 + t ... 28 +
// t of B in these 32, so that the 8 threads that read at once meet all banks. It has 16 columns
// that begin at 16 p(g), p = 0, 4, 1, 5, 2, 6, 3, 7. Instruction j multiplies column j of each of
// these 16. A has k in the same order; the thread picks A's bytes accordingly.

#pragma once

#include <stdint.h>

#include "common/turn_bytes.cuh"
#include "kernel_config.h"
#include "ptx/mma_of_8_bits.cuh"
#include "ptx/shared_memory.cuh"

namespace jax_tcgemm::sm90 {

template <KernelConfig kConfig>
struct StreamedLoop {
  using Product = ptx::MmaOf8Bits<kConfig.algorithm>;
  static constexpr int kLaneColumns = 16;
  static constexpr int kLaneRows = 8;  // of B
  static constexpr int kWarpK = 32;
  static_assert(kConfig.tile_m == 16 && kConfig.output_n() == 8 * kLaneColumns &&
                kConfig.tile_k == kWarpK * kConfig.consumer_warps());

  using Accumulators = typename Product::Sum[kLaneColumns][4];

  // Returns the address of 16 bytes in a row of 128, as TMA swizzles them.
  static __device__ __forceinline__ uint32_t vector_at(uint32_t operand, int row, int vector) {
    return operand + row * 128 + (vector ^ row % 8) * 16;
  }

  // Returns byte t of each word.
  static __device__ __forceinline__ uint32_t picked(const uint32_t (&word)[4], int t) {
    const uint32_t of_pair = t | (t + 4) << 4;
    return __byte_perm(__byte_perm(word[0], word[1], of_pair),
                       __byte_perm(word[2], word[3], of_pair), 0x5410);
  }

  // Reads rows g and g + 8.
  static __device__ __forceinline__ void read_a(typename Product::A& a, uint32_t smem_a, int k) {
    const int lane = threadIdx.x % 32;
    uint32_t row[2][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        uint32_t word[4];
        ptx::load_shared_16(word, vector_at(smem_a, 8 * half + lane / 4, k / 16 + j));
        row[half][j] = picked(word, lane % 4);
      }
    }
    Product::take(a, row);
  }

  static __device__ __forceinline__ void multiply(Accumulators& acc, uint32_t smem_a,
                                                  uint32_t smem_b, int warp) {
    const int lane = threadIdx.x % 32;
    const int group = lane / 8 + lane / 4 % 2 * 4;  // p(g)
    const int k = warp * kWarpK;
    uint32_t b[kLaneRows][4];
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      ptx::load_shared_16(b[i], vector_at(smem_b, k + 4 * i + lane % 4, group));
    }
    typename Product::A a;
    read_a(a, smem_a, k);
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const uint32_t low[4] = {b[0][word], b[1][word], b[2][word], b[3][word]};
      const uint32_t high[4] = {b[4][word], b[5][word], b[6][word], b[7][word]};
      uint32_t columns[2][4];
      turn_bytes(columns[0], low);
      turn_bytes(columns[1], high);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        Product::run(acc[4 * word + j], a, typename Product::B(columns[0][j], columns[1][j]));
      }
    }
  }
};

}  // namespace jax_tcgemm::sm90
