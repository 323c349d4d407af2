// The roles of an sm90 kernel where groups divide a dimension by sizes that only the device knows:
// the rows of A and D, each group with its own B (kRows), or k, each group with its own D (kDepth).
//
// The producer's warp alone looks at the sizes. It tells the consumers where each tile lies through
// two slots in shared memory, before it loads the tile's stages.
// Barriers, beside those of sm90/kernel.cuh: tile_full[slot]: 1 arrival of the producer;
//        tile_empty[slot]: each warp that computes the tile.
// Timeline, producer: next tile -> wait tile_empty -> write slot -> stages by TMA ...
//        consumer: wait tile_full -> read slot -> [wait turn] -> [zero what the first stage has of
//        other groups] -> mainloop; while its last instructions run: read the slot's rest -> output
//
// kRows: a tile begins with its group or a multiple of tile_m later. Rows of the next group that it
// loads too are not stored (OutputBuffers::send); rows of no group are zeros, without a product.
// kDepth: a group's first stage holds what is over a multiple of tile_k; the rest of that stage
// belongs to the next group, or to none, and is set to zero in both operands: it may be infinite.

#pragma once

#include <stdint.h>

#include "gemm_params.h"
#include "kernel_config.h"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/tma.cuh"
#include "scheduler/ragged.cuh"
#include "sm90/mainloop.cuh"
#include "sm90/output.cuh"
#include "sm90/producer.cuh"
#include "sm90/ring.cuh"
#include "sm90/tensor_maps.h"

namespace jax_tcgemm::sm90 {

// What a slot holds: of a tile's mainloop, and of its output. 16 bytes each.
struct RaggedMain {
  int stages;         // 0: D is zero there; -1: no tile is left
  int stage;          // of the ring, and its phase, with which the tile begins
  int phase;
  int first_stage_k;  // of the first stage, what belongs to the group
};
struct RaggedPlace {
  int row;      // of the block's tile in D
  int row_end;  // of the rows it may write
  int column;
  int group;
};

template <typename Part>
__device__ __forceinline__ void write_slot(uint32_t address, const Part& part) {
  const auto [x, y, z, w] = part;
  ptx::store_shared_16(address, {static_cast<uint32_t>(x), static_cast<uint32_t>(y),
                                 static_cast<uint32_t>(z), static_cast<uint32_t>(w)});
}

// By a warp. Told to be uniform, as in sm90/kernel.cuh.
template <typename Part>
__device__ __forceinline__ Part read_slot(uint32_t address) {
  const auto word = [&](int i) {
    return static_cast<int>(__shfl_sync(0xffffffff, ptx::load_shared_4(address + i * 4), 0));
  };
  return {word(0), word(1), word(2), word(3)};
}

template <KernelConfig kConfig, Major kMajorA, Major kMajorB>
struct RaggedProducer {
  static constexpr bool kRows = kConfig.ragged == Ragged::kRows;
  using Base = Producer<kConfig, kMajorA, kMajorB>;
  using Smem = SharedMemory<kConfig>;
  using Walk = RaggedWalk<kConfig.ragged, kConfig.tile_m * kConfig.cluster_m,
                          kConfig.tile_n * kConfig.cluster_n>;

  // By one warp.
  static __device__ __forceinline__ void run(const GemmParams& params, const TensorMaps& maps,
                                             const Smem& smem,
                                             const ClusterPlace<kConfig>& place) {
    constexpr int kSize = kConfig.cluster_size();
    Walk walk(params, blockIdx.x / kSize, gridDim.x / kSize);
    typename Base::LoaderA a = {&maps.a, false, place.n, place.sharers_of_a(), 0, {}};
    typename Base::LoaderB b = {&maps.b, false, place.m, place.sharers_of_b(), 0, {}};
    RingPosition<kConfig.stages> at;
    RingPosition<Smem::kTileSlots> slot;
    RaggedTile tile;
#pragma unroll 1
    while (walk.next(&tile)) {
      const RaggedMain main = main_of(params, tile, at);
      if (threadIdx.x % 32 == 0) {
        const RaggedPlace output = output_of(params, place, tile);
        publish(smem, slot, main, output);
        a.first = output.row;
        b.first = output.column;
        if constexpr (kRows) b.batch.z = output.group;
        load(smem, a, b, main, kRows ? 0 : tile.begin, at);
      }
      __syncwarp();
      slot.advance();
      at.skip(main.stages);
    }
    if (threadIdx.x % 32 != 0) return;
    constexpr int kConsumers = kConfig.schedule == Schedule::kPingpong ? 2 : 1;
    for (int i = 0; i < kConsumers; ++i, slot.advance()) {
      publish(smem, slot, {-1, 0, 0, 0}, {});
    }
  }

 private:
  static __device__ __forceinline__ RaggedMain main_of(const GemmParams& params,
                                                       const RaggedTile& tile,
                                                       const RingPosition<kConfig.stages>& at) {
    constexpr int kK = kConfig.tile_k;
    const auto phase = static_cast<int>(at.phase);
    if constexpr (kRows) {
      return {tile.group == params.batch ? 0 : (params.k - 1) / kK + 1, at.stage, phase, kK};
    } else {
      // A stage of nothing makes the zeros of an empty group.
      const int size = tile.end - tile.begin;
      const int stages = max(1, (size + kK - 1) / kK);
      return {stages, at.stage, phase, size - (stages - 1) * kK};
    }
  }

  static __device__ __forceinline__ RaggedPlace output_of(const GemmParams& params,
                                                          const ClusterPlace<kConfig>& place,
                                                          const RaggedTile& tile) {
    const int row = (tile.tile_m * kConfig.cluster_m + place.m) * kConfig.tile_m;
    const int column = (tile.tile_n * kConfig.cluster_n + place.n) * kConfig.tile_n;
    if constexpr (kRows) return {tile.begin + row, tile.end, column, tile.group};
    return {row, params.m, column, tile.group};
  }

  static __device__ __forceinline__ void publish(const Smem& smem,
                                                 const RingPosition<Smem::kTileSlots>& at,
                                                 const RaggedMain& main,
                                                 const RaggedPlace& output) {
    ptx::mbarrier_wait(smem.tile_empty(at.stage), at.phase ^ 1);
    write_slot(smem.tile_slot(at.stage), main);
    write_slot(smem.tile_slot(at.stage) + 16, output);
    ptx::mbarrier_arrive(smem.tile_full(at.stage));
  }

  // `k` is where the first stage begins.
  static __device__ __forceinline__ void load(const Smem& smem, const typename Base::LoaderA& a,
                                              const typename Base::LoaderB& b,
                                              const RaggedMain& main, int k,
                                              RingPosition<kConfig.stages> at) {
#pragma unroll 1
    for (int i = 0; i < main.stages; ++i, at.advance()) {
      ptx::mbarrier_wait(smem.empty(at.stage), at.phase ^ 1);
      ptx::mbarrier_arrive_expect(smem.full(at.stage), Base::kStageBytes);
      a.load(smem.a(at.stage), smem.full(at.stage), k);
      b.load(smem.b(at.stage), smem.full(at.stage), k);
      k += i == 0 ? main.first_stage_k : kConfig.tile_k;
    }
  }
};

template <KernelConfig kConfig, Major kMajorA, Major kMajorB>
struct RaggedConsumer {
  using Smem = SharedMemory<kConfig>;
  using Main = Mainloop<kConfig, kMajorA, kMajorB>;
  static constexpr bool kPingpong = kConfig.schedule == Schedule::kPingpong;
  static constexpr int kWarpgroups = kConfig.consumer_warps() / 4;

  static __device__ __forceinline__ void run(const GemmParams& params, const TensorMaps& maps,
                                             const Smem& smem,
                                             const ClusterPlace<kConfig>& place) {
    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
    const int row = kPingpong ? 0 : warpgroup * (kConfig.tile_m / kWarpgroups);  // of the tile
    Main mainloop(smem, place, row);
    Output<kConfig, false> output(params, maps, smem, warpgroup);
    // Of its tiles; in pingpong each consumer has a slot of its own. One register says it all.
#pragma unroll 1
    for (uint32_t tile = 0;; ++tile) {
      static_assert(Smem::kTileSlots == 2);
      const int slot = kPingpong ? warpgroup : tile % 2;
      ptx::mbarrier_wait(smem.tile_full(slot), (kPingpong ? tile : tile / 2) % 2);
      const RaggedMain main = read_slot<RaggedMain>(smem.tile_slot(slot));
      if (main.stages < 0) break;
      // The first turn is consumer 0's.
      if constexpr (kPingpong) ptx::mbarrier_wait(smem.turn(warpgroup), (tile + warpgroup + 1) % 2);
      OutputPlace at;
      const auto find_place = [&] {
        if constexpr (kPingpong) {
          if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(smem.turn(warpgroup ^ 1));
        }
        const RaggedPlace place = read_slot<RaggedPlace>(smem.tile_slot(slot) + 16);
        __syncwarp();
        if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(smem.tile_empty(slot));
        at = {place.row + row, place.column, place.group};
        output.limit_rows(place.row_end);
      };
      if (kConfig.ragged == Ragged::kRows && main.stages == 0) {
        find_place();
        output.clear(at);
      } else {
        mainloop.at.stage = main.stage;
        mainloop.at.phase = main.phase;
        if constexpr (kConfig.ragged == Ragged::kDepth) {
          if (main.first_stage_k < kConfig.tile_k) clear_first_stage(smem, main, warpgroup);
        }
        typename Main::Accumulators acc;
        mainloop.run(acc, main.stages, [&] {
          // While the last instructions run.
          find_place();
          output.share_bias(at);
        });
        output.finish(acc, at);
      }
    }
    output.drain();
  }

 private:
  // Sets to zero what the tile's first stage has loaded beyond the group. By the tile's consumers.
  static __device__ __forceinline__ void clear_first_stage(const Smem& smem, const RaggedMain& main,
                                                           int warpgroup) {
    constexpr int kThreads = kPingpong ? 128 : kConfig.consumer_warps() * 32;
    constexpr int kSlabBytes = kConfig.tile_k * 128;
    constexpr int kSlabs = kConfig.stage_bytes() / kSlabBytes;
    static_assert(kMajorA == Major::kMn && kMajorB == Major::kMn);
    ptx::mbarrier_wait(smem.full(main.stage), main.phase);
    const int chunks = (kConfig.tile_k - main.first_stage_k) * 8;  // 16 bytes each, of a slab
#pragma unroll 1
    for (int i = threadIdx.x % kThreads; i < kSlabs * chunks; i += kThreads) {
      const int slab = i / chunks;
      ptx::store_shared_16(smem.a(main.stage) + slab * kSlabBytes + main.first_stage_k * 128 +
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
