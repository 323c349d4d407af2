// The loop over k that adds up parts of it apart, in float32.

#pragma once

#include "kernel_config.h"
#include "ptx/wgmma.cuh"
#include "sm90/stage_loop.cuh"

namespace jax_tcgemm::sm90 {

template <KernelConfig kConfig, typename Layout>
struct PromotingLoop : StageLoop<kConfig, Layout> {
  using Base = StageLoop<kConfig, Layout>;
  using Base::add;
  using Base::begin_stage;
  using Base::kElementBytes;
  using Base::kTakesTurns;
  using Base::release;
  using typename Base::Accumulators;

  // The tensor cores cut sums off; those of few stages, added up in float32, lose little by it: of
  // two where k is so long that what XLA's kernels lose has grown, too. Of products of 8 bits they
  // keep 14 bits, of which the 128 of a stage are enough.
  template <typename Passed>
  __device__ __forceinline__ void run_promoting(Accumulators& total, int count, Passed& passed) {
    if constexpr (!kTakesTurns) {
      run_alone(total, count, passed);
    } else if constexpr (kElementBytes == 1) {
      run_in_groups<1>(total, count, passed);
    } else {
      if (count <= 8) return run_in_groups<1>(total, count, passed);
      run_in_groups<2>(total, count, passed);
    }
  }

 private:
  // While it adds, another warpgroup multiplies.
  template <typename Passed>
  __device__ __forceinline__ void run_alone(Accumulators& total, int count, Passed& passed) {
    Accumulators apart;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const int stage = begin_stage(apart, true);
      if (i + 1 == count) passed();
      this->template end_stage<0>(apart, stage);
      add(total, apart);
    }
  }

  // Adds to `total`. Groups of stages take turns with two sets of accumulators, so that one is
  // multiplied while the other is added. What does not fill a group makes a larger one, the first.
  template <int kGroup, typename Passed>
  __device__ __forceinline__ void run_in_groups(Accumulators& total, int count, Passed& passed) {
    Accumulators even;
    Accumulators odd;
    int stage = begin_stage(odd, true);
    int left = count - 1;
#pragma unroll 1
    for (; left % kGroup > 0; --left) stage = extend(odd, stage);
#pragma unroll 1
    while (left > 0) {
      int next = begin_stage(even, true);
      this->template end_stage<1>(odd, stage);
      add(total, odd);
      next = extend_group<kGroup>(even, next);
      left -= kGroup;
      if (left == 0) {
        passed();
        this->template end_stage<0>(even, next);
        return add(total, even);
      }
      stage = begin_stage(odd, true);
      this->template end_stage<1>(even, next);
      add(total, even);
      stage = extend_group<kGroup>(odd, stage);
      left -= kGroup;
    }
    passed();
    this->template end_stage<0>(odd, stage);
    add(total, odd);
  }

  // Multiplies the rest of a group of which a stage has begun.
  template <int kGroup>
  __device__ __forceinline__ int extend_group(Accumulators& acc, int stage) {
#pragma unroll
    for (int i = 1; i < kGroup; ++i) stage = extend(acc, stage);
    return stage;
  }

  // Multiplies one stage more of the group of which `stage` has begun; returns which it is.
  __device__ __forceinline__ int extend(Accumulators& acc, int stage) {
    const int next = begin_stage(acc, false);
    ptx::wgmma_wait<1>();
    release(stage);
    return next;
  }
};

}  // namespace jax_tcgemm::sm90
