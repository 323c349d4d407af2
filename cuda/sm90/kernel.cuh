// The sm90 kernel: a persistent grid of clusters whose blocks compute one tile of D after the
// other.
//
// Roles: the first warpgroups are consumers; the warps after them the producer, of which one thread
//        works (sm90/producer.cuh) and whose registers go to the consumers where those are many.
//        Cooperative: consumer w of one to three computes rows w * tile_m / consumers of each tile
//        of its block. Pingpong: consumers 0 and 1 compute every other tile each.
// Barriers (sm90/ring.cuh): full[stage]: 1 arrival of the producer + the bytes of the stage;
//        empty[stage]: each warp that reads the stage, of every block its producer writes to;
//        turn[w] (pingpong): 4 warps of the other consumer; c_full: 1 + bytes; partial_full and
//        partial_empty (split k): all consumer warps of the cluster; fixup_full[warp] (parts of
//        k): 1 + bytes. Named barrier 1 + w: the 128 threads of consumer w; 4: all consumers.
// Timeline, producer: wait empty -> expect bytes -> TMA A, B ...                 (tile after tile)
//        consumer: send for C -> [wait turn] -> mainloop (sm90/mainloop.cuh); while its last
//        instructions run: [pass the turn], fetch the bias -> [sm90/split_k/in_workspace.cuh] ->
//        output (sm90/output/output.cuh, or sm90/output/transposed.cuh, or
//        sm90/output/compiled.cuh, or sm90/split_k/in_cluster.cuh). The producer runs ahead into
//        the next tile meanwhile; in pingpong the other consumer multiplies.
// A block of a cluster ends when nothing more will be written to it or read from it, which its
// producer waits for; a barrier of the cluster in its place takes half a microsecond.

#pragma once

#include <stdint.h>

#include <type_traits>

#include "gemm_params.h"
#include "kernel_config.h"
#include "ptx/cluster.cuh"
#include "scheduler/raster.cuh"
#include "sm90/layouts.cuh"
#include "sm90/mainloop.cuh"
#include "sm90/output/output.cuh"
#include "sm90/output/transposed.cuh"
#include "sm90/producer.cuh"
#include "sm90/ragged.cuh"
#include "sm90/ring.cuh"
#include "sm90/split_k/in_cluster.cuh"
#include "sm90/split_k/in_workspace.cuh"
#include "sm90/tensor_maps.h"

namespace jax_tcgemm {
struct CompiledParams;
}

namespace jax_tcgemm::sm90 {

// Of a Program see sm90/output/compiled.cuh, which kernels of the package do without.
template <KernelConfig kConfig, bool kSwapAb, typename Program>
struct OutputOf;
template <KernelConfig kConfig, bool kSwapAb>
struct OutputOf<kConfig, kSwapAb, void> {
  using Type =
      std::conditional_t<kConfig.swap_ab, TransposedOutput<kConfig>, Output<kConfig, kSwapAb>>;
};

// Of a Program with scales by blocks see sm90/scaled_mainloop.cuh.
template <KernelConfig kConfig, typename Layouts, typename Program>
struct MainloopOf {
  using Type = Mainloop<kConfig, Layouts>;
};

// Program: an epilogue compiled at run time (sm90/output/compiled.cuh), or void.
template <KernelConfig kConfig, bool kSwapAb, typename Layouts, typename Program = void>
struct Kernel {
  using Smem = SharedMemory<kConfig>;
  using Place = ClusterPlace<kConfig>;
  using Main = typename MainloopOf<kConfig, Layouts, Program>::Type;
  static constexpr bool kCompiled = !std::is_same_v<Program, void>;
  using Params = std::conditional_t<kCompiled, CompiledParams, GemmParams>;
  using Out = typename OutputOf<kConfig, kSwapAb, Program>::Type;
  static constexpr bool kPingpong = kConfig.schedule == Schedule::kPingpong;
  static constexpr int kWarpgroups = kConfig.consumer_warps() / 4;
  // Of a thread; together they are all of an SM's.
  static constexpr int kProducerRegisters = kWarpgroups == 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = kWarpgroups == 3 ? 160 : 232;

  static __device__ __forceinline__ OutputPlace output_place(const GemmParams& params,
                                                             const TileWalk& walk,
                                                             const Place& place, int row) {
    const TileCoordinate tile = raster_tile(params.raster, walk.index);
    return {(tile.tile_m * kConfig.cluster_m + place.m) * kConfig.tile_m + row,
            (tile.tile_n * kConfig.cluster_n + place.n) * kConfig.output_n(), walk.batch};
  }

  static __device__ __forceinline__ void consume(const Params& params, const TensorMaps& maps,
                                                 const Smem& smem, const Place& place) {
    // Told to be uniform, so that what depends on it goes through uniform registers.
    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
    const int row = kPingpong ? 0 : warpgroup * (kConfig.tile_m / kWarpgroups);  // of the tile
    const int k_tiles = (params.k - 1) / kConfig.tile_k + 1;
    const auto stages = [&](int matrix) {
      const auto range = place.k_range(k_tiles, params.split_stages, matrix);
      return range.end - range.begin;
    };
    Main mainloop(params, smem, place, row);
    Out output(params, maps, smem, warpgroup);
    SplitOutput<kConfig> split_output(params, smem, place);
    TileWalk walk(params, blockIdx.x / kConfig.cluster_size());
    uint32_t turn_phase = warpgroup ^ 1;  // the first turn is consumer 0's
    if (kPingpong && warpgroup == 1) {
      walk.advance(params);
      mainloop.at.skip(stages(0));  // as many for every tile
    }
#pragma unroll 1
    while (!walk.done(params)) {
      OutputPlace at;
      typename Main::Accumulators acc;
      if (Out::prepares(maps)) output.prepare(output_place(params, walk, place, row));
      if constexpr (Main::kScales) mainloop.begin(output_place(params, walk, place, row));
      if constexpr (kPingpong) ptx::mbarrier_wait(smem.turn(warpgroup), turn_phase);
      mainloop.run(acc, stages(walk.batch), [&] {
        // While the last instructions run.
        if constexpr (kPingpong) {
          if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(smem.turn(warpgroup ^ 1));
        }
        at = output_place(params, walk, place, row);
        if constexpr (kConfig.split_k == 1) output.share_bias(at);
      });
      if constexpr (kConfig.has_fixup() && !kCompiled) {
        if (params.fixup.parts > 0) {
          if (SplitFixup<kConfig>(params, smem, walk.batch).run(acc)) {
            output.finish_sum(acc, at);
          }
          break;
        }
      }
      if constexpr (kConfig.split_k > 1) {
        split_output.finish(acc, row, at);
      } else {
        output.finish(acc, at);
      }
      walk.advance(params);
      if constexpr (kPingpong) {
        walk.advance(params);
        mainloop.at.skip(stages(0));
        turn_phase ^= 1;
      }
    }
    output.drain();
  }

  static __device__ __forceinline__ void run(const Params& params, const TensorMaps& maps,
                                             const Smem& smem) {
    constexpr int kProducer = kConfig.consumer_warps();
    const Place place;
    if (threadIdx.x == kProducer * 32) {
      smem.init_barriers();
      ptx::prefetch_tensor_map(&maps.a);
      ptx::prefetch_tensor_map(&maps.b);
      if constexpr (!kCompiled) ptx::prefetch_tensor_map(&maps.d);
    }
    __syncwarp();
    if constexpr (kConfig.cluster_size() > 1) {
      ptx::cluster_arrive_relaxed();
      ptx::cluster_wait();
    } else {
      __syncthreads();
    }
    if (threadIdx.x / 32 >= kProducer) {
      if constexpr (kWarpgroups > 1) ptx::decrease_registers<kProducerRegisters>();
      if constexpr (kConfig.grouped != Grouped::kNone) {
        if (threadIdx.x / 32 == kProducer) {
          visit_layout(Layouts(), params, [&]<typename Layout>(Layout) {
            RaggedProducer<kConfig, Layout>::run(params, maps, smem, place);
          });
        }
      } else if (threadIdx.x == kProducer * 32) {
        visit_layout(Layouts(), params, [&]<typename Layout>(Layout) {
          Producer<kConfig, Layout>::run(params, maps, smem, place);
        });
      }
    } else {
      if constexpr (kWarpgroups > 1) ptx::increase_registers<kConsumerRegisters>();
      if constexpr (kConfig.grouped != Grouped::kNone) {
        RaggedConsumer<kConfig, Layouts, Out>::run(params, maps, smem, place);
      } else {
        consume(params, maps, smem, place);
      }
    }
  }
};

// `Row` carries the configuration as a type: nvcc's host stubs cannot name class-type template
// values.
template <typename Row, bool kSwapAb, typename Layouts>
__global__ void __launch_bounds__(Row::kConfig.threads(), Row::kConfig.blocks_on_sm())
    gemm_kernel(const __grid_constant__ GemmParams params,
                const __grid_constant__ TensorMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char smem[];
  Kernel<Row::kConfig, kSwapAb, Layouts>::run(params, maps, {ptx::shared_address(smem)});
#endif
}

}  // namespace jax_tcgemm::sm90
