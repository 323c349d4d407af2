// The loop over k of sm90/streamed_kernel.cuh, which tells what a thread holds.
//
//   loads of two steps -> [multiply one, load the next but one] ...
//
// B goes to registers at once: copies to shared memory of rows of 128 bytes, by cp.async or in
// bulk, get half as much from memory (docs/performance.md).

#pragma once

#include <stdint.h>

#include "common/turn_bytes.cuh"
#include "gemm_params.h"
#include "kernel_config.h"
#include "ptx/global_memory.cuh"
#include "ptx/mma_of_8_bits.cuh"
#include "scheduler/raster.cuh"

namespace jax_tcgemm::sm90 {

// One warp's part of 16 kBlocks rows of A, and of the columns of a tile.
template <KernelConfig kConfig, bool kBatched>
struct StreamedLoop {
  using Product = ptx::MmaOf8Bits<kConfig.algorithm>;
  static constexpr int kBlocks = kConfig.tile_m / 16;
  static constexpr int kLaneColumns = 16;
  static constexpr int kLaneRows = 8;  // of k
  static constexpr int kParts = kConfig.consumer_warps() * kConfig.split_k;
  static constexpr int kPeriod = kConfig.tile_k * kParts;
  static_assert(kConfig.tile_k == 4 * kLaneRows && kConfig.output_n() == 8 * kLaneColumns);

  using Accumulators = typename Product::Sum[kBlocks][kLaneColumns][4];

  struct Step {
    uint32_t b[kLaneRows][4];
    uint32_t a[kBlocks][2][2];  // rows g and g + 8
  };

  uint64_t a, b;  // addresses of the thread's first elements
  int64_t a_pitch, b_pitch;
  int k;       // the thread's next, of the tile's
  int k_end;   // of the product
  int rows;    // left of A, from the thread's first one on
  bool has_b;  // whether its columns exist

  // Part `part` of k; `a_row` and `b_column` are the thread's first.
  __device__ __forceinline__ StreamedLoop(const GemmParams& params, const void* weight, int batch,
                                          int a_row, int b_column, int part) {
    const int first = part * kConfig.tile_k + threadIdx.x % 4 * kLaneRows;
    a_pitch = params.a.ld;
    b_pitch = params.b.ld;
    k = first;
    k_end = params.k;
    rows = params.m - a_row;
    has_b = b_column < params.n;
    a = reinterpret_cast<uint64_t>(params.a.data) +
        batch_offset_if<kBatched>(params, batch, params.a.batch) + a_row * a_pitch + first;
    b = reinterpret_cast<uint64_t>(weight) +
        batch_offset_if<kBatched>(params, batch, params.b.batch) + first * b_pitch + b_column;
  }

  // Of what lies outside of the matrices zeros. A thread's rows are all inside or all outside,
  // since k is a multiple of 16.
  __device__ __forceinline__ void load(Step& step) {
    const bool inside = k < k_end;
    uint64_t from = b;
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i, from += b_pitch) {
      ptx::load_global_16_once_if(step.b[i], from, inside && has_b);
    }
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = 16 * i + 8 * half;
        ptx::load_global_8_if(step.a[i][half], a + row * a_pitch, inside && row < rows);
      }
    }
    k += kPeriod;
    a += kPeriod;
    b += kPeriod * b_pitch;
  }

  static __device__ __forceinline__ void multiply(Accumulators& acc, const Step& step) {
    typename Product::A a[kBlocks];
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) Product::take(a[i], step.a[i]);
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const uint32_t low[4] = {step.b[0][word], step.b[1][word], step.b[2][word], step.b[3][word]};
      const uint32_t high[4] = {step.b[4][word], step.b[5][word], step.b[6][word], step.b[7][word]};
      uint32_t columns[2][4];
      turn_bytes(columns[0], low);
      turn_bytes(columns[1], high);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const typename Product::B column(columns[0][j], columns[1][j]);
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) Product::run(acc[i][4 * word + j], a[i], column);
      }
    }
  }

  __device__ __forceinline__ void run(Accumulators& acc) {
    Step even;
    Step odd;
    load(even);
    load(odd);
#pragma unroll 1
    for (int left = (k_end - 1) / kPeriod + 1; left > 0; left -= 2) {
      multiply(acc, even);
      load(even);
      multiply(acc, odd);
      load(odd);
    }
  }
};

}  // namespace jax_tcgemm::sm90
