// The consumers' loop over k. A warpgroup multiplies its rows of A by all columns of B, one stage
// of the ring after the other.

#pragma once

#include <type_traits>

#include "common/dtype.cuh"
#include "kernel_config.h"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/layouts.cuh"
#include "sm90/plane_loop.cuh"
#include "sm90/promoting_loop.cuh"
#include "sm90/register_loop.cuh"
#include "sm90/ring.cuh"
#include "sm90/tensor_maps.h"

namespace jax_tcgemm::sm90 {

constexpr bool a_from_registers(const KernelConfig& config, Major a) {
  return element_bytes(config.algorithm) == 4 && a == Major::kMn;
}

template <KernelConfig kConfig, typename Layout>
using LoopOfLayout = std::conditional_t<
    a_from_registers(kConfig, Layout::kMajorA) ||
        transposes_b(kConfig, Layout::kMajorA, Layout::kMajorB),
    RegisterLoop<kConfig, Layout>,
    std::conditional_t<kConfig.planes, PlaneLoop<kConfig, Layout>, PromotingLoop<kConfig, Layout>>>;

// The mainloop for operands of one layout.
template <KernelConfig kConfig, typename Layout>
struct LayoutMainloop : LoopOfLayout<kConfig, Layout> {
  using Base = LoopOfLayout<kConfig, Layout>;
  using Base::add;
  using Base::adds_apart;
  using Base::at;
  using Base::clear;
  using Base::fence;
  using Base::release;
  using Base::smem;
  using typename Base::Accumulators;

  // Sets acc to the product over `count` stages. Calls `passed` when no more instructions are to be
  // issued.
  template <typename Passed>
  __device__ __forceinline__ void run(Accumulators& acc, int count, Passed&& passed) {
    if constexpr (kConfig.skinny) {
      run_at_once(acc, count, passed);
    } else if constexpr (transposes_b(kConfig, Layout::kMajorA, Layout::kMajorB)) {
      this->run_transposing(acc, count, passed);
    } else if constexpr (a_from_registers(kConfig, Layout::kMajorA)) {
      this->run_from_registers(acc, count, passed);
    } else if constexpr (kConfig.planes) {
      this->run_planes(acc, passed);
    } else if constexpr (kConfig.promote) {
      clear(acc);
      this->run_promoting(acc, count, passed);
    } else {
      this->run_from_shared(acc, count, passed);
    }
  }

 private:
  // For kernels bound by memory: releases each stage at once, so that the producer can load it
  // again. There is time to sum the stages separately too, if the result shows it.
  template <typename Passed>
  __device__ __forceinline__ void run_at_once(Accumulators& total, int count, Passed& passed) {
    Accumulators apart;
    Accumulators& acc = kConfig.promote ? apart : total;
    if constexpr (kConfig.promote) clear(total);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      ptx::mbarrier_wait(smem.full(at.stage), at.phase);
      fence(acc);
      ptx::wgmma_fence();
      this->issue_stage(acc, (kConfig.promote && adds_apart) || i == 0);
      ptx::wgmma_commit();
      fence(acc);
      ptx::wgmma_wait<0>();
      release(at.stage);
      at.advance();
      if constexpr (kConfig.promote) {
        fence(acc);
        if (adds_apart || i + 1 == count) add(total, acc);
      }
    }
    fence(total);
    passed();
  }
};

// The mainloop for operands of any of `Layouts`. It keeps its place in the ring from tile to tile.
template <KernelConfig kConfig, typename Layouts>
struct Mainloop {
  static constexpr bool kScales = false;
  static constexpr int kBlocks = kConfig.tile_m / (16 * kConfig.warps_m);
  using Accumulators = SumOf<kConfig.algorithm>[kBlocks][kConfig.tile_n / 2];

  const GemmParams& params;
  const SharedMemory<kConfig>& smem;
  int first_row;
  bool has_partner;
  RingPosition<ring_stages(kConfig, Layouts())> at;

  __device__ __forceinline__ Mainloop(const GemmParams& params, const SharedMemory<kConfig>& smem,
                                      const ClusterPlace<kConfig>& place, int first_row)
      : params(params), smem(smem), first_row(first_row) {
    has_partner = place.shares_with(threadIdx.x % 32);
  }

  // See LayoutMainloop::run.
  template <typename Passed>
  __device__ __forceinline__ void run(Accumulators& acc, int count, Passed&& passed) {
    visit_layout(Layouts(), params, [&]<typename Layout>(Layout) {
      const int lane = threadIdx.x % 32;
      LayoutMainloop<kConfig, Layout> mainloop = {
          {{smem, first_row, lane, has_partner, params.epilogue.d_type == ElementType::kF32,
            params.planes, at}}};
      mainloop.run(acc, count, passed);
      at = mainloop.at;
    });
  }
};

}  // namespace jax_tcgemm::sm90
