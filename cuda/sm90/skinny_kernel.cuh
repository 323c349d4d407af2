// The kernel for few rows or few columns, which is bound by memory: the longer operand goes past
// once, and everything before its first load and after its last is kept short.
//
// Roles: one consumer warpgroup, of rows of the longer operand (wgmma's M); one producer warp, of
//        which a thread works (sm90/producer.cuh).
// Barriers: full[stage]: 1 arrival of the producer + the bytes of the stage; empty[stage]: 4 warps;
//        partial_full (split k): 1 + the bytes of the other blocks' sums; partial_empty: all
//        consumer warps of the cluster, when they have read those. Named barrier 0: the barriers
//        are initialised; 1: the consumers.
// Timeline, producer: initialise -> TMA A, B ...       (waits for no other warp)
//        consumer: fetch bias, scalars -> mainloop (sm90/mainloop.cuh) -> sums and D
//        (sm90/skinny_output.cuh). The producer runs ahead into the next tile meanwhile.
// That the blocks of a cluster have started is waited for only when sums are to be sent. None is
// written to after its end, because each waits for all that it is sent.

#pragma once

#include <stdint.h>

#include "gemm_params.h"
#include "kernel_config.h"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "scheduler/raster.cuh"
#include "sm90/mainloop.cuh"
#include "sm90/producer.cuh"
#include "sm90/ring.cuh"
#include "sm90/skinny_output.cuh"
#include "sm90/tensor_maps.h"

namespace jax_tcgemm::sm90 {

template <KernelConfig kConfig, Major kMajorLong, Major kMajorShort>
struct SkinnyKernel {
  using Smem = SharedMemory<kConfig>;
  using Place = ClusterPlace<kConfig>;
  using Main = Mainloop<kConfig, kMajorLong, kMajorShort>;
  static constexpr int kConsumerWarps = 4;
  static_assert(kConfig.consumer_warps() == kConsumerWarps);
  static constexpr int kStartBarrier = 0;

  static __device__ __forceinline__ void consume(const GemmParams& params, const TensorMaps& maps,
                                                 const Smem& smem, const Place& place) {
    const int k_tiles = (params.k - 1) / kConfig.tile_k + 1;
    Main mainloop(smem, place, 0);
    SkinnyOutput<kConfig> output(params, smem, place.k, maps.exchanged);
    TileWalk walk(params, blockIdx.x / kConfig.cluster_size());
#pragma unroll 1
    while (!walk.done(params)) {
      const TileCoordinate tile = raster_tile(params.raster, walk.index);
      const auto range = place.k_range(k_tiles, params.split_stages, walk.batch);
      const auto epilogue = output.prepare(tile.tile_m * kConfig.tile_m,
                                           tile.tile_n * kConfig.tile_n, walk.batch);
      walk.advance(params);
      typename Main::Accumulators acc;
      mainloop.run(acc, range.end - range.begin, [] {});
      output.finish(acc, epilogue, walk.done(params));
    }
  }

  // By the producer's warp; a lane has a stage.
  static __device__ __forceinline__ void init_barriers(const Smem& smem) {
    const int lane = threadIdx.x % 32;
    static_assert(kConfig.stages < 32);
    if (lane < kConfig.stages) {
      ptx::mbarrier_init(smem.full(lane), 1);
      ptx::mbarrier_init(smem.empty(lane), kConsumerWarps);
    } else if (kConfig.split_k > 1 && lane == 31) {
      ptx::mbarrier_init(smem.partial_full(), 1);
      ptx::mbarrier_init(smem.partial_empty(), kConsumerWarps * kConfig.split_k);
      ptx::mbarrier_arrive_expect(smem.partial_full(), SkinnyOutput<kConfig>::kReceivedBytes);
    }
    ptx::fence_mbarrier_init();
    __syncwarp();
  }

  static __device__ __forceinline__ void run(const GemmParams& params, const TensorMaps& maps,
                                             const Smem& smem) {
    constexpr int kThreads = (kConsumerWarps + 1) * 32;
    const Place place;
    // Its code comes first: a jump would wait for instructions.
    if (__builtin_expect(threadIdx.x / 32 == kConsumerWarps, true)) {
      init_barriers(smem);
      if constexpr (kConfig.split_k > 1) ptx::cluster_arrive_relaxed();
      ptx::named_barrier_arrive(kStartBarrier, kThreads);
      if (threadIdx.x % 32 == 0) {
        Producer<kConfig, kMajorLong, kMajorShort>::run(params, maps, smem, place);
      }
      __syncwarp();
      if constexpr (kConfig.split_k > 1) ptx::cluster_wait();
    } else {
      if constexpr (kConfig.split_k > 1) ptx::cluster_arrive_relaxed();
      ptx::named_barrier_sync(kStartBarrier, kThreads);
      consume(params, maps, smem, place);
    }
  }
};

}  // namespace jax_tcgemm::sm90
