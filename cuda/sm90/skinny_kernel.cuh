// The kernel for few rows or few columns, which is bound by memory. It reads the longer operand
// once, and keeps short all work before the first load and after the last one.
//
// Roles: One consumer warpgroup computes rows of the longer operand (wgmma's M). In the one
//        producer warp a single thread works.
//        If there are two weights, a tile has rows of both: the first half of the accumulators
//        belongs to the first weight, the gate.
// Barriers: full[stage]: 1 arrival of the producer + the bytes of the stage. empty[stage]: 4 warps.
//        partial_full (split k): 1 + the bytes of the other blocks' sums. partial_empty: all
//        consumer warps of the cluster, when they have read those sums. Named barrier 0: the
//        barriers are initialised. Named barrier 1: the consumers.
// Timeline, producer: initialise -> TMA A, B ...       (waits for no other warp)
//        consumer: fetch bias, scalars (after the mainloop if its sums leave no registers) ->
//        mainloop (sm90/mainloop.cuh) -> sums and D (sm90/output/skinny.cuh, or
//        sm90/output/skinny_function.cuh). Meanwhile the producer runs ahead into the next tile.
// A block waits for the start of the other blocks of its cluster only before it sends sums. No
// block is written to after its end, because each waits for all sums that it is sent.
//
// Work that a block does once takes as long as memory takes to bring instructions and parameters,
// one line after the other. The kernel therefore has its own producer for at most one batch
// dimension, a simpler order of tiles (along the longer extent first), and separate kernels for a
// plain D and a D with a bias.

#pragma once

#include <stdint.h>

#include <type_traits>

#include "epilogue/known.cuh"
#include "gemm_params.h"
#include "kernel_config.h"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "scheduler/raster.cuh"
#include "sm90/layouts.cuh"
#include "sm90/mainloop.cuh"
#include "sm90/output/skinny.cuh"
#include "sm90/producer.cuh"
#include "sm90/ring.cuh"
#include "sm90/tensor_maps.h"

namespace jax_tcgemm::sm90 {

// Products with at most a bias have a kernel for each layout (sm90/kernels.cuh): reading the layout
// would fetch one more line of parameters before the first load. Output: SkinnyOutput, or
// SkinnyFunction (sm90/output/skinny_function.cuh) with its Params.
template <KernelConfig kConfig, typename Layouts, typename Output = SkinnyOutput<kConfig>,
          typename Params = GemmParams>
struct SkinnyKernel {
  using Smem = SharedMemory<kConfig>;
  using Place = ClusterPlace<kConfig>;
  using Main = Mainloop<kConfig, Layouts>;
  using Out = Output;
  static constexpr bool kCompiled = !std::is_same_v<Params, GemmParams>;
  static constexpr int kConsumerWarps = 4;
  static_assert(kConfig.consumer_warps() == kConsumerWarps);
  static constexpr int kStartBarrier = 0;
  static constexpr int kThreads = (kConsumerWarps + 1) * 32;

  // First row of a tile along the longer and along the shorter extent.
  struct TilePlace {
    int first_long, first_short;
  };
  static __device__ __forceinline__ TilePlace tile_place(const GemmParams& params, int index) {
    const int tile = params.raster.width.divide(index);  // all tiles are one group
    return {(index - tile * params.raster.width.divisor) * kConfig.output_m(),
            tile * kConfig.tile_n};
  }

  static __device__ __forceinline__ void consume(const Params& params, const TensorMaps& maps,
                                                 const Smem& smem, const Place& place) {
    const int k_tiles = (params.k - 1) / kConfig.tile_k + 1;
    Main mainloop(params, smem, place, 0);
    Out output(params, smem, place.k, maps.swap_ab);
    const int stages =
        (place.k + 1) * k_tiles / kConfig.split_k - place.k * k_tiles / kConfig.split_k;
    bool started = false;
#pragma unroll 1
    for (TileWalk walk(params, blockIdx.x / kConfig.cluster_size()); !walk.done(params);) {
      const TilePlace tile = tile_place(params, walk.index);
      output.begin(tile.first_long, tile.first_short, walk.batch);
      walk.advance(params);
      const auto compute = [&](auto&& store) {
        if (!started) ptx::named_barrier_sync(kStartBarrier, kThreads);
        started = true;
        typename Main::Accumulators acc;
        mainloop.run(acc, stages, [] {});
        output.collect(acc, walk.done(params));
        store();
      };
      if constexpr (kCompiled) {
        output.prefetch();
        compute([&] { output.run(); });
      } else if constexpr (kConfig.epilogue == EpilogueWork::kSum) {
        // One mainloop serves both cases, because its code is most of the kernel's.
        const bool is_plain = known_finish(maps.finish) == Finish::kProduct;
        typename Out::Line line;
        if (!Out::kFetchesLate && !is_plain) line = output.line();
        compute([&] {
          if (is_plain) return output.store_plain();
          if (Out::kFetchesLate) line = output.line();
          output.store_line(line);
        });
      } else if constexpr (kConfig.epilogue == EpilogueWork::kNone) {
        compute([&] { output.store_plain(); });
      } else if constexpr (Out::kFetchesLate) {
        compute([&] { output.store(output.epilogue()); });
      } else {
        const auto epilogue = output.epilogue();
        compute([&] { output.store(epilogue); });
      }
    }
  }

  // Reads all lines of the parameters at once. If they came one after the other, as they are used,
  // they would take a block longer than its first load.
  static __device__ __forceinline__ void touch_parameters(const GemmParams& params, int warp) {
    constexpr int kLineWords = 16;
    constexpr int kWords = sizeof(GemmParams) / 4;
    const int* words = reinterpret_cast<const int*>(&params);
    int any = 0;
#pragma unroll
    for (int first = 0; first < kWords; first += kConsumerWarps * kLineWords) {
      const int word = first + warp * kLineWords;
      any |= words[word < kWords ? word : kWords - 1];
    }
    if (any == 0x5bd1e995) __nanosleep(1);  // keeps the reads from being optimised away
  }

  static __device__ __forceinline__ void init_barriers(const Smem& smem) {
    for (int stage = 0; stage < kConfig.stages; ++stage) {
      ptx::mbarrier_init(smem.full(stage), 1);
      ptx::mbarrier_init(smem.empty(stage), kConsumerWarps);
    }
    if constexpr (kConfig.split_k > 1) {
      ptx::mbarrier_init(smem.partial_full(), 1);
      ptx::mbarrier_init(smem.partial_empty(), kConsumerWarps * kConfig.split_k);
      ptx::mbarrier_arrive_expect(smem.partial_full(), Out::kReceivedBytes);
    }
    ptx::fence_mbarrier_init();
  }

  // One thread calls this.
  template <typename Layout>
  static __device__ __forceinline__ void produce(const GemmParams& params, const TensorMaps& maps,
                                                 const Smem& smem, const Place& place) {
    constexpr int kStageBytes = kConfig.stage_bytes();
    const int k_tiles = (params.k - 1) / kConfig.tile_k + 1;
    constexpr int kWeightBytes = kConfig.operand_bytes(kConfig.output_m());
    OperandLoader<kConfig, kConfig.output_m(), Layout::kMajorA, 1> a = {&maps.a, false, 0,
                                                                        0,       0,     {}};
    OperandLoader<kConfig, kConfig.tile_n, Layout::kMajorB, 1> b = {&maps.b, false, 0, 0, 0, {}};
    RingPosition<kConfig.stages> at;
#pragma unroll 1
    for (TileWalk walk(params, blockIdx.x / kConfig.cluster_size()); !walk.done(params);
         walk.advance(params)) {
      const TilePlace tile = tile_place(params, walk.index);
      a.first = tile.first_long;
      b.first = tile.first_short;
      a.batch.z = b.batch.z = 0;
      if (walk.batch > 0) {
        if (maps.a_moves[0]) a.batch.z = walk.batch;
        if (maps.b_moves[0]) b.batch.z = walk.batch;
      }
      const int end = (place.k + 1) * k_tiles / kConfig.split_k;
#pragma unroll 1
      for (int k = place.k * k_tiles / kConfig.split_k; k < end; ++k, at.advance()) {
        ptx::mbarrier_wait(smem.empty(at.stage), at.phase ^ 1);
        ptx::mbarrier_arrive_expect(smem.full(at.stage), kStageBytes);
        a.load(smem.a(at.stage), smem.full(at.stage), k * kConfig.tile_k);
        if constexpr (kConfig.gated) {
          auto a2 = a;
          a2.map = &maps.b2;
          a2.load(smem.a(at.stage) + kWeightBytes, smem.full(at.stage), k * kConfig.tile_k);
        }
        b.load(smem.b(at.stage), smem.full(at.stage), k * kConfig.tile_k);
      }
    }
  }

  static __device__ __forceinline__ void run(const Params& params, const TensorMaps& maps,
                                             const Smem& smem) {
    const Place place;
    const int warp = threadIdx.x / 32;
    if (warp == kConsumerWarps) {
      if (threadIdx.x % 32 == 0) init_barriers(smem);
      __syncwarp();
      if constexpr (kConfig.split_k > 1) ptx::cluster_arrive_relaxed();
      ptx::named_barrier_arrive(kStartBarrier, kThreads);
      if (threadIdx.x % 32 == 0) {
        visit_layout(Layouts(), params,
                     [&]<typename Layout>(Layout) { produce<Layout>(params, maps, smem, place); });
      }
      __syncwarp();
      if constexpr (kConfig.split_k > 1) ptx::cluster_wait();
    } else {
      touch_parameters(params, warp);
      if (warp == 0) ptx::prefetch_tensor_map(&maps.a);
      if (warp == 1) ptx::prefetch_tensor_map(&maps.b);
      if constexpr (kConfig.split_k > 1) ptx::cluster_arrive_relaxed();
      consume(params, maps, smem, place);
    }
  }
};

// The cluster size is fixed, so that the cluster's barriers need not read it.
template <typename Row, typename Layouts>
__global__ void __cluster_dims__(Row::kConfig.cluster_size(), 1, 1)
    __launch_bounds__(Row::kConfig.threads(), Row::kConfig.blocks_on_sm())
        skinny_kernel(const __grid_constant__ GemmParams params,
                      const __grid_constant__ TensorMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char smem[];
  SkinnyKernel<Row::kConfig, Layouts>::run(params, maps, {ptx::shared_address(smem)});
#endif
}

}  // namespace jax_tcgemm::sm90
