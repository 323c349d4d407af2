// The consumers' loop over k for operands with block scales: one scale for each 1 x 128 (k) of A
// and each 128 x 128 of B. The loop sums the products of a stage (128 bytes of k) separately,
// multiplies the sum by the product of the two scales, and adds it to the total in float32. It is a
// promoting loop with a factor.
//
//   a stage: begin -> (it, or the one before, is done) -> total += factor * products -> ask for the
//            scales of two stages further on
//
// If registers suffice, two sets of accumulators alternate, so that one set is multiplied while the
// other is added. For wider tiles another warpgroup multiplies while this one adds.

#pragma once

#include <stdint.h>

#include "compiled_params.h"
#include "ptx/global_memory.cuh"
#include "scheduler/raster.cuh"
#include "sm90/kernel.cuh"
#include "sm90/mainloop.cuh"
#include "sm90/output/output_buffers.cuh"

namespace jax_tcgemm::sm90 {

template <KernelConfig kConfig, bool kBatched>
struct ScaledMainloop {
  using Loop = StageLoop<kConfig, LayoutKK>;
  using Accumulators = typename Loop::Accumulators;
  static constexpr bool kScales = true;
  // Columns of a tile, and columns of a group. All columns of a group share one scale of B. A tile
  // may begin within a block.
  static constexpr int kColumns = kConfig.tile_n;
  static constexpr int kGroupColumns = kColumns <= kScaleBlock ? kColumns
                                       : kColumns % 64 == 0    ? 64
                                                               : 32;
  static constexpr int kGroups = kColumns / kGroupColumns;
  static_assert(kConfig.promote && Loop::kBlocks == 1 && kConfig.tile_k == kScaleBlock &&
                kColumns % kGroupColumns == 0 && kScaleBlock % kGroupColumns == 0);

  const CompiledParams& params;
  const SharedMemory<kConfig>& smem;
  int first_row;
  bool has_partner;
  RingPosition<kConfig.stages> at;
  // Scales of the next stage to ask for: of a thread's two rows, and of the groups of columns.
  const float* scale_a[2];
  const float* scale_b[kGroups];

  __device__ __forceinline__ ScaledMainloop(const CompiledParams& params,
                                            const SharedMemory<kConfig>& smem,
                                            const ClusterPlace<kConfig>& place, int first_row)
      : params(params), smem(smem), first_row(first_row) {
    has_partner = place.shares_with(threadIdx.x % 32);
  }

  // Call this before run with the place of the warpgroup's rows and columns in D. Rows and columns
  // beyond D get the scale of the last row or column.
  __device__ __forceinline__ void begin(const OutputPlace& place) {
    const BlockScales& scales = params.scales;
    const float* const a =
        scales.a + batch_offset_if<kBatched>(params, place.batch, scales.a_batch);
    const float* const b =
        scales.b + batch_offset_if<kBatched>(params, place.batch, scales.b_batch);
    const int row = place.row + threadIdx.x / 32 % 4 * kWarpRows + threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scale_a[i] = a + min(row + 8 * i, params.m - 1) * scales.a_stride_m;
    }
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const int column = min(place.column + i * kGroupColumns, params.n - 1);
      scale_b[i] = b + column / kScaleBlock * scales.b_stride_n;
    }
  }

  // Sets total to the product over `count` stages. `passed`: as in LayoutMainloop::run.
  template <typename Passed>
  __device__ __forceinline__ void run(Accumulators& total, int count, Passed&& passed) {
    Loop loop = {smem,          first_row, static_cast<int>(threadIdx.x % 32), has_partner, false,
                 params.planes, at};
    Loop::clear(total);
    left_ = count;
    if constexpr (Loop::kTakesTurns) {
      run_in_turns(loop, total, count, passed);
    } else {
      run_alone(loop, total, count, passed);
    }
    at = loop.at;
  }

 private:
  struct Factors {
    float a[2];
    float b[kGroups];
  };

  template <typename Passed>
  __device__ __forceinline__ void run_alone(Loop& loop, Accumulators& total, int count,
                                            Passed& passed) {
    Accumulators products;
    Factors now = next_factors();
    Factors then = next_factors();
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const int stage = loop.begin_stage(products, true);
      if (i + 1 == count) passed();
      loop.template end_stage<0>(products, stage);
      add(total, products, now);
      now = then;
      then = next_factors();
    }
  }

  template <typename Passed>
  __device__ __forceinline__ void run_in_turns(Loop& loop, Accumulators& total, int count,
                                               Passed& passed) {
    Accumulators even, odd;
    Factors of_odd = next_factors();
    Factors of_even = next_factors();
    int stage = loop.begin_stage(odd, true);
#pragma unroll 1
    for (int i = 1; i < count; i += 2) {
      const int next = loop.begin_stage(even, true);
      loop.template end_stage<1>(odd, stage);
      add(total, odd, of_odd);
      of_odd = next_factors();
      if (i + 1 == count) {
        passed();
        loop.template end_stage<0>(even, next);
        return add(total, even, of_even);
      }
      stage = loop.begin_stage(odd, true);
      loop.template end_stage<1>(even, next);
      add(total, even, of_even);
      of_even = next_factors();
    }
    passed();
    loop.template end_stage<0>(odd, stage);
    add(total, odd, of_odd);
  }

  // Loads the factors of the next stage. The compiler would delay ordinary loads until their use.
  // After the last stage this loads the last stage's factors again.
  __device__ __forceinline__ Factors next_factors() {
    Factors factors;
#pragma unroll
    for (int i = 0; i < 2; ++i) factors.a[i] = ptx::load_global_4(scale_a[i]);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) factors.b[i] = ptx::load_global_4(scale_b[i]);
    if (--left_ > 0) {
#pragma unroll
      for (const float*& scale : scale_a) scale += params.scales.a_stride_k;
#pragma unroll
      for (const float*& scale : scale_b) scale += params.scales.b_stride_k;
    }
    return factors;
  }

  static __device__ __forceinline__ void add(Accumulators& total, const Accumulators& products,
                                             const Factors& factors) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const float factor[2] = {factors.a[0] * factors.b[group], factors.a[1] * factors.b[group]};
#pragma unroll
      for (int i = 0; i < kGroupColumns / 2; ++i) {
        const int j = group * kGroupColumns / 2 + i;
        total[0][j] = fmaf(factor[j / 2 % 2], products[0][j], total[0][j]);
      }
    }
  }

  int left_;  // stages whose scales have not been loaded
};

template <KernelConfig kConfig, typename Layouts, typename Program>
  requires(Program::kBlockScales)
struct MainloopOf<kConfig, Layouts, Program> {
  using Type = ScaledMainloop<kConfig, Program::kBatched>;
};

}  // namespace jax_tcgemm::sm90
