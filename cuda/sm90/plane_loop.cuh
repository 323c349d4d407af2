// The loop over k for float32 operands split into planes (GemmParams::planes). The producer loads
// every plane of a k-tile once. The loop multiplies it by each plane of the other operand that
// counts.
//
// Stages: One stage per plane of a k-tile, for both operands, the last plane first. The ring holds
//         one k-tile and as much of the next one as fits.
// Sums: The products of a k-tile go into one set of accumulators, the smallest first, because the
//         tensor cores truncate. The loop adds this set to the total in float32 while the next
//         k-tile is multiplied in another set. In one set, the small products of a second tile
//         would be truncated relative to the sum over the first (lab/precision.md).
// Scaled planes (passes/split_planes.h): The loop scales the sum over one order before it adds the
//         next order. Only another warpgroup multiplies during that time.

#pragma once

#include "gemm_params.h"
#include "kernel_config.h"
#include "ptx/mbarrier.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/stage_loop.cuh"

namespace jax_tcgemm::sm90 {

template <KernelConfig kConfig, typename Layout>
struct PlaneLoop : StageLoop<kConfig, Layout> {
  using Base = StageLoop<kConfig, Layout>;
  using Base::add;
  using Base::at;
  using Base::clear;
  using Base::fence;
  using Base::planes;
  using Base::release;
  using Base::smem;
  using typename Base::Accumulators;

  template <typename Passed>
  __device__ __forceinline__ void run_planes(Accumulators& total, Passed& passed) {
    clear(total);
    // Nine products are rare, so small code matters more than speed.
    if (planes.scale->bits != 0 || planes.order > 2) {
      run_scaled(total, passed);
    } else if (planes.count == 2) {
      run_as_they_are<2>(total, planes.k_tiles, passed);
    } else {
      run_as_they_are<3>(total, planes.k_tiles, passed);
    }
    // Two factors, one after the other: their product may be out of float32's range.
    multiply(total, planes.scale->shift[0]);
    multiply(total, planes.scale->shift[1]);
  }

 private:
  static __device__ __forceinline__ float power_of_two(int exponent) {
    return __int_as_float((127 + exponent) << 23);
  }

  static __device__ __forceinline__ void multiply(Accumulators& total, int shift) {
    if (shift == 0) return;
    const float scale = power_of_two(-shift);
#pragma unroll
    for (auto& block : total) {
#pragma unroll
      for (float& value : block) value *= scale;
    }
  }

  // The stages of a k-tile. The first stage is that of the last plane.
  struct Tile {
    int first;
    int count;

    __device__ __forceinline__ int stage(int plane) const {
      constexpr int kStages = ring_stages(kConfig, Layout::kMajorA, Layout::kMajorB);
      const int stage = first + count - 1 - plane;
      return stage < kStages ? stage : stage - kStages;
    }
  };

  __device__ __forceinline__ Tile next_tile(int count) {
    const Tile tile = {at.stage, count};
#pragma unroll
    for (int i = 0; i < count; ++i) {
      ptx::mbarrier_wait(smem.full(at.stage), at.phase);
      at.advance();
    }
    return tile;
  }

  // Issues the products of planes i and kOrder - i. `first`: overwrite acc.
  template <int kOrder, int kCount>
  __device__ __forceinline__ void issue_order(Accumulators& acc, const Tile& tile,
                                              bool first) const {
    constexpr int kBegin = kOrder < kCount ? 0 : kOrder - kCount + 1;
#pragma unroll
    for (int i = kBegin; i <= kOrder - kBegin; ++i) {
      this->issue_product(acc, tile.stage(i), tile.stage(kOrder - i), first && i == kBegin);
    }
  }

  static __device__ __forceinline__ void begin(Accumulators& acc) {
    fence(acc);
    ptx::wgmma_fence();
  }
  static __device__ __forceinline__ void commit(Accumulators& acc) {
    ptx::wgmma_commit();
    fence(acc);
  }
  template <int kPending>
  static __device__ __forceinline__ void wait(Accumulators& acc) {
    ptx::wgmma_wait<kPending>();
    fence(acc);
  }

  // Issues the products of the order that begins a k-tile, as one group of instructions.
  template <int kCount>
  __device__ __forceinline__ void begin_tile(Accumulators& acc, const Tile& tile) const {
    begin(acc);
    issue_order<kCount - 1, kCount>(acc, tile, true);
    commit(acc);
  }

  // Issues the other products. A group ends with the last read of a plane; then each plane but
  // plane 0 is released.
  template <int kCount>
  __device__ __forceinline__ void end_tile(Accumulators& acc, const Tile& tile) const {
    begin(acc);
    if constexpr (kCount == 3) {
      issue_order<1, kCount>(acc, tile, false);
      ptx::wgmma_commit();
    }
    issue_order<0, kCount>(acc, tile, false);
    commit(acc);
    ptx::wgmma_wait<kCount - 1>();
    release(tile.stage(kCount - 1));
    if constexpr (kCount == 3) {
      ptx::wgmma_wait<1>();
      release(tile.stage(1));
    }
  }

  template <int kCount, typename Passed>
  __device__ __forceinline__ void run_as_they_are(Accumulators& total, int tiles, Passed& passed) {
    Accumulators even;
    Accumulators odd;
    Tile tile = next_tile(kCount);
    begin_tile<kCount>(even, tile);
    end_tile<kCount>(even, tile);
#pragma unroll 1
    for (;;) {
      if (--tiles == 0) break;
      const Tile next = turn<kCount>(total, even, odd, tile);
      if (--tiles == 0) {
        passed();
        return finish<0>(total, odd, next);
      }
      tile = turn<kCount>(total, odd, even, next);
    }
    passed();
    finish<0>(total, even, tile);
  }

  // Multiplies the next tile in `other`, and adds this tile's sums in `acc` to `total`.
  template <int kCount>
  __device__ __forceinline__ Tile turn(Accumulators& total, Accumulators& acc, Accumulators& other,
                                       const Tile& tile) {
    const Tile next = next_tile(kCount);
    begin_tile<kCount>(other, next);
    // With three planes the ring holds two tiles, so the producer soon needs this tile's stages.
    if constexpr (kCount == 3) finish<1>(total, acc, tile);
    end_tile<kCount>(other, next);
    if constexpr (kCount == 2) finish<1>(total, acc, tile);
    return next;
  }

  // Adds a tile's sums while kPending groups are still running.
  template <int kPending>
  __device__ __forceinline__ void finish(Accumulators& total, Accumulators& acc,
                                         const Tile& tile) const {
    wait<kPending>(acc);
    release(tile.stage(0));
    add(total, acc);
  }

  // Computes any products, one order after the other. Only another warpgroup multiplies while this
  // one scales sums.
  template <typename Passed>
  __device__ __forceinline__ void run_scaled(Accumulators& total, Passed& passed) {
    const float scale = power_of_two(-planes.scale->bits);
    Accumulators acc;
#pragma unroll 1
    for (int tiles = planes.k_tiles; tiles > 0; --tiles) {
      const Tile tile = next_tile(planes.count);
#pragma unroll 1
      for (int order = planes.order;; --order) {
        const int first = order < planes.count ? 0 : order - planes.count + 1;
#pragma unroll 1
        for (int i = first; i <= order - first; ++i) {
          begin(acc);
          this->issue_product(acc, tile.stage(i), tile.stage(order - i),
                              order == planes.order && i == first);
          commit(acc);
        }
        if (tiles == 1 && order == 0) passed();
        wait<0>(acc);
        if (order < planes.count) release(tile.stage(order));
        if (order == 0) break;
        scale_sums(acc, scale);
      }
      add(total, acc);
    }
  }

  // Sets sums that are not finite to zero: an infinity leaves only NaN in the lower planes, and
  // sums may exceed float32's range where D does. The products of order 0 then decide D.
  static __device__ __forceinline__ void scale_sums(Accumulators& acc, float scale) {
#pragma unroll
    for (auto& block : acc) {
#pragma unroll
      for (float& value : block) {
        value = fabsf(value) <= 0x1.fffffep127f ? value * scale : 0.f;
      }
    }
  }
};

}  // namespace jax_tcgemm::sm90
