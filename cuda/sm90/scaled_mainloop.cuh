// The consumers' loop over k where both operands have scales by blocks: of 1 x 128 (k) of A, of
// 128 x 128 of B. The products of a stage, which is 128 bytes of k, are added up apart, multiplied
// by what the blocks' scales make, and added in float32: the promoting loop with a factor.
//
//   a stage: begin -> ask for its scales -> (the one before is done) -> total += factor * products
//
// Two sets of accumulators take turns, so that one is multiplied while the other is added.

#pragma once

#include <stdint.h>

#include "compiled_params.h"
#include "ptx/global_memory.cuh"
#include "scheduler/raster.cuh"
#include "sm90/kernel.cuh"
#include "sm90/mainloop.cuh"
#include "sm90/output/output_buffers.cuh"

namespace jax_tcgemm::sm90 {

template <KernelConfig kConfig>
struct ScaledMainloop {
  using Loop = LayoutMainloop<kConfig, LayoutKK>;
  using Accumulators = typename Loop::Accumulators;
  static constexpr bool kScales = true;
  static_assert(kConfig.promote && Loop::kBlocks == 1 && kConfig.tile_k == kScaleBlock &&
                kScaleBlock % kConfig.tile_n == 0);

  const CompiledParams& params;
  const SharedMemory<kConfig>& smem;
  int first_row;
  bool has_partner;
  RingPosition<kConfig.stages> at;
  const float* scale_a[2];  // of a thread's two rows, at the first stage
  const float* scale_b;

  __device__ __forceinline__ ScaledMainloop(const CompiledParams& params,
                                            const SharedMemory<kConfig>& smem,
                                            const ClusterPlace<kConfig>& place, int first_row)
      : params(params), smem(smem), first_row(first_row) {
    has_partner = place.shares_with(threadIdx.x % 32);
  }

  // Before run: where the warpgroup's rows and columns of D lie. Rows beyond D have the last one's
  // scales.
  __device__ __forceinline__ void begin(const OutputPlace& place) {
    const BlockScales& scales = params.scales;
    const float* const a = scales.a + batch_offset(params, place.batch, scales.a_batch);
    const int row = place.row + threadIdx.x / 32 % 4 * kWarpRows + threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scale_a[i] = a + min(row + 8 * i, params.m - 1) * scales.a_stride_m;
    }
    scale_b = scales.b + batch_offset(params, place.batch, scales.b_batch) +
              min(place.column, params.n - 1) / kScaleBlock * scales.b_stride_n;
  }

  // Sets total to the product over `count` stages; `passed` as of LayoutMainloop::run.
  template <typename Passed>
  __device__ __forceinline__ void run(Accumulators& total, int count, Passed&& passed) {
    Loop loop = {smem, first_row, static_cast<int>(threadIdx.x % 32), has_partner, false,
                 params.planes, at};
    Loop::clear(total);
    Accumulators even, odd;
    int stage = loop.begin_stage(odd, true);
    Factors of_odd = factors(0);
    Factors of_even;
#pragma unroll 1
    for (int i = 1; i < count; i += 2) {
      const int next = loop.begin_stage(even, true);
      of_even = factors(i);
      loop.template end_stage<1>(odd, stage);
      add(total, odd, of_odd);
      if (i + 1 == count) {
        passed();
        loop.template end_stage<0>(even, next);
        add(total, even, of_even);
        at = loop.at;
        return;
      }
      stage = loop.begin_stage(odd, true);
      of_odd = factors(i + 1);
      loop.template end_stage<1>(even, next);
      add(total, even, of_even);
    }
    passed();
    loop.template end_stage<0>(odd, stage);
    add(total, odd, of_odd);
    at = loop.at;
  }

 private:
  struct Factors {
    float a[2];
    float b;
  };

  // Asked for here: the compiler would put loads off until they are needed.
  __device__ __forceinline__ Factors factors(int stage) const {
    return {{ptx::load_global_4(scale_a[0] + stage * params.scales.a_stride_k),
             ptx::load_global_4(scale_a[1] + stage * params.scales.a_stride_k)},
            ptx::load_global_4(scale_b + stage * params.scales.b_stride_k)};
  }

  static __device__ __forceinline__ void add(Accumulators& total, const Accumulators& products,
                                             const Factors& factors) {
    const float factor[2] = {factors.a[0] * factors.b, factors.a[1] * factors.b};
#pragma unroll
    for (int j = 0; j < kConfig.tile_n / 2; ++j) {
      total[0][j] = fmaf(factor[j / 2 % 2], products[0][j], total[0][j]);
    }
  }
};

template <KernelConfig kConfig, typename Layouts, typename Program>
  requires(Program::kBlockScales)
struct MainloopOf<kConfig, Layouts, Program> {
  using Type = ScaledMainloop<kConfig>;
};

}  // namespace jax_tcgemm::sm90
