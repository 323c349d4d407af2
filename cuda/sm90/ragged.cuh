// The roles of an sm90 kernel for ragged products: groups divide a dimension by sizes that only the
// device knows. kM: groups divide the rows of A and D, and each group has its own B. kK: groups
// divide k, and each group has its own D.
//
// Only the producer's warp reads the sizes. It tells the consumers where each tile lies through two
// slots in shared memory, before it loads the tile's stages.
// Barriers, besides those of sm90/kernel.cuh: tile_full[slot]: 1 arrival of the producer;
//        tile_empty[slot]: each warp that computes the tile.
// Timeline, producer: next tile -> wait tile_empty -> write slot -> stages by TMA ...
//        consumer: wait tile_full -> read slot -> [wait turn] -> [zero the other groups' part of
//        the first stage] -> mainloop -> output
//
// kM: a tile begins at the start of its group or a multiple of tile_m after it. The producer may
// load rows of the next group too; the consumers do not store them (OutputBuffers::send). Rows of
// no group become zeros without a product.
// kK: a group's first stage holds the remainder of its k over a multiple of tile_k. The rest of
// that stage belongs to the next group or to none. The consumers set the rest to zero in both
// operands, because it may be infinite.

#pragma once

#include <stdint.h>

#include <concepts>

#include "gemm_params.h"
#include "kernel_config.h"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/tma.cuh"
#include "scheduler/ragged.cuh"
#include "sm90/mainloop.cuh"
#include "sm90/output/output.cuh"
#include "sm90/producer.cuh"
#include "sm90/ring.cuh"
#include "sm90/tensor_maps.h"

namespace jax_tcgemm::sm90 {

// The content of a slot: one tile.
struct RaggedSlot {
  int row;      // first row of the block's tile in D
  int row_end;  // end of the rows that the block may write
  int column;
  int group;   // -1: no tile is left
  int stages;  // 0: the tile of D is zero
  int stage;   // position in the ring, with its phase, where the tile begins
  int phase;
  int first_stage_k;  // k of the first stage that belong to the group

  __device__ __forceinline__ void write(uint32_t address) const {
    ptx::store_shared_16(address, {static_cast<uint32_t>(row), static_cast<uint32_t>(row_end),
                                   static_cast<uint32_t>(column), static_cast<uint32_t>(group)});
    ptx::store_shared_16(address + 16,
                         {static_cast<uint32_t>(stages), static_cast<uint32_t>(stage),
                          static_cast<uint32_t>(phase), static_cast<uint32_t>(first_stage_k)});
  }
  static __device__ __forceinline__ RaggedSlot read(uint32_t address) {
    // Uniform for the compiler, as in sm90/kernel.cuh.
    const auto word = [&](int i) {
      return static_cast<int>(__shfl_sync(0xffffffff, ptx::load_shared_4(address + i * 4), 0));
    };
    return {word(0), word(1), word(2), word(3), word(4), word(5), word(6), word(7)};
  }
};

template <KernelConfig kConfig, typename Layout>
struct RaggedProducer {
  static constexpr bool kRows = kConfig.grouped == Grouped::kM;
  using Base = Producer<kConfig, Layout>;
  using Smem = SharedMemory<kConfig>;
  using Walk = RaggedWalk<kConfig.grouped, kConfig.tile_m * kConfig.cluster_m,
                          kConfig.tile_n * kConfig.cluster_n>;

  // One warp calls this.
  static __device__ __forceinline__ void run(const GemmParams& params, const TensorMaps& maps,
                                             const Smem& smem, const ClusterPlace<kConfig>& place) {
    constexpr int kSize = kConfig.cluster_size();
    Walk walk(params, blockIdx.x / kSize, gridDim.x / kSize);
    typename Base::LoaderA a = {&maps.a, false, place.n, place.sharers_of_a(), 0, {}};
    typename Base::LoaderB b = {&maps.b, false, place.m, place.sharers_of_b(), 0, {}};
    RingPosition<kConfig.stages> at;
    RingPosition<Smem::kTileSlots> slot;
    RaggedTile tile;
#pragma unroll 1
    while (walk.next(&tile)) {
      const RaggedSlot next = slot_of(params, place, tile, at);
      if (threadIdx.x % 32 == 0) {
        publish(smem, slot, next);
        load(smem, a, b, next, tile.begin, at);
      }
      __syncwarp();
      slot.advance();
      at.skip(next.stages);
    }
    if (threadIdx.x % 32 != 0) return;
    constexpr int kConsumers = kConfig.schedule == Schedule::kPingpong ? 2 : 1;
    for (int i = 0; i < kConsumers; ++i, slot.advance()) {
      publish(smem, slot, {0, 0, 0, -1, 0, 0, 0, 0});
    }
    Base::drain(smem, at);
  }

 private:
  static __device__ __forceinline__ RaggedSlot slot_of(const GemmParams& params,
                                                       const ClusterPlace<kConfig>& place,
                                                       const RaggedTile& tile,
                                                       const RingPosition<kConfig.stages>& at) {
    constexpr int kK = kConfig.tile_k;
    const int row = (tile.tile_m * kConfig.cluster_m + place.m) * kConfig.tile_m;
    const int column = (tile.tile_n * kConfig.cluster_n + place.n) * kConfig.tile_n;
    const auto phase = static_cast<int>(at.phase);
    if constexpr (kRows) {
      const int stages = tile.group == params.batch ? 0 : (params.k - 1) / kK + 1;
      return {tile.begin + row, tile.end, column, tile.group, stages, at.stage, phase, kK};
    } else {
      // An empty group has one stage of zeros, which gives a D of zeros.
      const int stages = max(1, (tile.end - tile.begin + kK - 1) / kK);
      const int first_stage_k = tile.end - tile.begin - (stages - 1) * kK;
      return {row, params.m, column, tile.group, stages, at.stage, phase, first_stage_k};
    }
  }

  static __device__ __forceinline__ void publish(const Smem& smem,
                                                 const RingPosition<Smem::kTileSlots>& at,
                                                 const RaggedSlot& slot) {
    ptx::mbarrier_wait(smem.tile_empty(at.stage), at.phase ^ 1);
    slot.write(smem.tile_slot(at.stage));
    ptx::mbarrier_arrive(smem.tile_full(at.stage));
  }

  static __device__ __forceinline__ void load(const Smem& smem, typename Base::LoaderA& a,
                                              typename Base::LoaderB& b, const RaggedSlot& slot,
                                              int begin, RingPosition<kConfig.stages> at) {
    a.first = slot.row;
    b.first = slot.column;
    if constexpr (kRows) b.batch.z = slot.group;
#pragma unroll 1
    for (int i = 0; i < slot.stages; ++i, at.advance()) {
      const int k =
          kRows || i == 0 ? i * kConfig.tile_k : slot.first_stage_k + (i - 1) * kConfig.tile_k;
      ptx::mbarrier_wait(smem.empty(at.stage), at.phase ^ 1);
      ptx::mbarrier_arrive_expect(smem.full(at.stage), Base::kStageBytes);
      a.load(smem.a(at.stage), smem.full(at.stage), kRows ? k : begin + k);
      b.load(smem.b(at.stage), smem.full(at.stage), kRows ? k : begin + k);
    }
  }
};

// Out: Output, or the class that replaces it.
template <KernelConfig kConfig, typename Layouts, typename Out>
struct RaggedConsumer {
  using Smem = SharedMemory<kConfig>;
  using Main = Mainloop<kConfig, Layouts>;
  static constexpr bool kPingpong = kConfig.schedule == Schedule::kPingpong;
  static constexpr int kWarpgroups = kConfig.consumer_warps() / 4;

  template <typename Params>
  static __device__ __forceinline__ void run(const Params& params, const TensorMaps& maps,
                                             const Smem& smem, const ClusterPlace<kConfig>& place) {
    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
    const int row = kPingpong ? 0 : warpgroup * (kConfig.tile_m / kWarpgroups);  // in the tile
    Main mainloop(params, smem, place, row);
    Out output(params, maps, smem, warpgroup);
    RingPosition<Smem::kTileSlots> slot_at;
    if (kPingpong && warpgroup == 1) slot_at.advance();
    uint32_t turn_phase = warpgroup ^ 1;  // consumer 0 has the first turn
#pragma unroll 1
    while (true) {
      const RaggedSlot slot = take(smem, slot_at);
      if (slot.group < 0) break;
      if constexpr (kPingpong) ptx::mbarrier_wait(smem.turn(warpgroup), turn_phase);
      const auto pass_turn = [&] {
        if constexpr (kPingpong) {
          if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(smem.turn(warpgroup ^ 1));
        }
      };
      const OutputPlace at = {slot.row + row, slot.column, slot.group};
      output.limit_rows(slot.row_end);
      if (kConfig.grouped == Grouped::kM && slot.stages == 0) {
        pass_turn();
        output.clear(at);
      } else {
        mainloop.at.stage = slot.stage;
        mainloop.at.phase = slot.phase;
        if constexpr (kConfig.grouped == Grouped::kK) {
          if (slot.first_stage_k < kConfig.tile_k) clear_first_stage(smem, slot, warpgroup);
        }
        typename Main::Accumulators acc;
        if constexpr (!std::same_as<Out, Output<kConfig, false>>) output.prepare(at);
        mainloop.run(acc, slot.stages, [&] {
          pass_turn();
          output.share_bias(at);
        });
        output.finish(acc, at);
      }
      slot_at.skip(kPingpong ? 2 : 1);
      turn_phase ^= 1;
    }
    output.drain();
  }

 private:
  static __device__ __forceinline__ RaggedSlot take(const Smem& smem,
                                                    const RingPosition<Smem::kTileSlots>& at) {
    ptx::mbarrier_wait(smem.tile_full(at.stage), at.phase);
    const RaggedSlot slot = RaggedSlot::read(smem.tile_slot(at.stage));
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(smem.tile_empty(at.stage));
    return slot;
  }

  // Sets to zero the part of the tile's first stage that lies beyond the group. The rows of both
  // operands run along mn in shared memory. All consumers of the tile call this.
  static __device__ __forceinline__ void clear_first_stage(const Smem& smem, const RaggedSlot& slot,
                                                           int warpgroup) {
    constexpr int kThreads = kPingpong ? 128 : kConfig.consumer_warps() * 32;
    constexpr int kSlabBytes = kConfig.tile_k * 128;
    constexpr int kSlabs = kConfig.stage_bytes() / kSlabBytes;
    static_assert(std::same_as<Layouts, LayoutSet<LayoutMnMn>>);
    ptx::mbarrier_wait(smem.full(slot.stage), slot.phase);
    const int chunks = (kConfig.tile_k - slot.first_stage_k) * 8;  // of 16 bytes, in a slab
#pragma unroll 1
    for (int i = threadIdx.x % kThreads; i < kSlabs * chunks; i += kThreads) {
      const int slab = i / chunks;
      ptx::store_shared_16(smem.a(slot.stage) + slab * kSlabBytes + slot.first_stage_k * 128 +
                               (i - slab * chunks) * 16,
                           {0, 0, 0, 0});
    }
    ptx::fence_proxy_async();
    if constexpr (kPingpong) {
      ptx::named_barrier_sync(kWarpgroupBarrier + warpgroup, kThreads);
    } else {
      ptx::named_barrier_sync(kConsumerBarrier, kThreads);
    }
  }
};

}  // namespace jax_tcgemm::sm90
