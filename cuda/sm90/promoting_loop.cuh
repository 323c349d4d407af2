// The loop over k that sums groups of stages separately and adds these sums in float32.

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

  // The tensor cores truncate sums. Sums over few stages, added in float32, lose little. Two stages
  // a group suffice for long k, where the error of XLA's kernels has grown too. For 8-bit products
  // the tensor cores keep 14 bits, which suffices for the 128 elements of a stage.
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
  // Another warpgroup multiplies while this one adds.
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

  // Adds the groups of stages to `total`. Groups alternate between two sets of accumulators, so
  // that one set is multiplied while the other is added. The first group is larger if the stages do
  // not divide evenly.
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

  // Multiplies the rest of a group whose first stage has begun.
  template <int kGroup>
  __device__ __forceinline__ int extend_group(Accumulators& acc, int stage) {
#pragma unroll
    for (int i = 1; i < kGroup; ++i) stage = extend(acc, stage);
    return stage;
  }

  // Multiplies one more stage of the group in which `stage` has begun. Returns its index in the
  // ring.
  __device__ __forceinline__ int extend(Accumulators& acc, int stage) {
    const int next = begin_stage(acc, false);
    ptx::wgmma_wait<1>();
    release(stage);
    return next;
  }
};

}  // namespace jax_tcgemm::sm90
