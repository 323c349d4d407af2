// The sm90 kernel: a persistent grid of clusters. Each block computes one tile of D after the
// other.
//
// Roles: The first warpgroups are consumers. The warps after them are the producer. One producer
//        thread works (sm90/producer.cuh). If there is more than one consumer warpgroup, the
//        producer gives its registers to the consumers.
//        Cooperative: consumer w of one to three computes rows w * tile_m / consumers of each
//        tile.
//        Pingpong: consumers 0 and 1 take turns, each computes every other tile.
// Barriers (sm90/ring.cuh), with their arrivals:
//        full[stage]: 1 of the producer + the bytes of the stage.
//        empty[stage]: each warp that reads the stage, in every block that the producer writes to.
//        turn[w] (pingpong): 4 warps of the other consumer. c_full: 1 + bytes.
//        partial_full, partial_empty (split k): all consumer warps of the cluster.
//        fixup_full[warp] (parts of k): 1 + bytes.
//        Named barrier 1 + w: the 128 threads of consumer w. Named barrier 4: all consumers.
// Timeline, producer: wait empty -> expect bytes -> TMA A, B ...                 (tile after tile)
//        consumer: send for C -> [wait turn] -> mainloop (sm90/mainloop.cuh); while its last
//        instructions run: [pass the turn], fetch the bias -> [sm90/split_k/in_workspace.cuh] ->
//        output (sm90/output/output.cuh, or sm90/output/transposed.cuh, or
//        sm90/output/compiled.cuh, or sm90/split_k/in_cluster.cuh). Meanwhile the producer runs
//        ahead into the next tile; in pingpong the other consumer multiplies.
// A block of a cluster ends when no other block will write to it or read from it. Its producer
// waits for that. A barrier of the cluster would take half a microsecond instead.

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

// sm90/output/compiled.cuh specializes this for a Program. The package's kernels do without it.
template <KernelConfig kConfig, bool kSwapAb, typename Program>
struct OutputOf;
template <KernelConfig kConfig, bool kSwapAb>
struct OutputOf<kConfig, kSwapAb, void> {
  using Type =
      std::conditional_t<kConfig.swap_ab, TransposedOutput<kConfig>, Output<kConfig, kSwapAb>>;
};

// sm90/scaled_mainloop.cuh specializes this for a Program with block scales.
template <KernelConfig kConfig, typename Layouts, typename Program>
struct MainloopOf {
  using Type = Mainloop<kConfig, Layouts>;
};

// Checks if a Program is the epilogue of the sum of parts of k.
template <typename Program>
concept AddsParts = requires { Program::kAddsParts; };

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
  // Registers of a thread. All threads together use all registers of an SM.
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
    // The shuffle tells the compiler that the value is uniform, so that dependent values use
    // uniform registers.
    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
    const int row = kPingpong ? 0 : warpgroup * (kConfig.tile_m / kWarpgroups);  // in the tile
    const int k_tiles = (params.k - 1) / kConfig.tile_k + 1;
    const auto stages = [&](int matrix) {
      const auto range = place.k_range(k_tiles, params.split_stages, matrix);
      return range.end - range.begin;
    };
    Main mainloop(params, smem, place, row);
    Out output(params, maps, smem, warpgroup);
    SplitOutput<kConfig> split_output(params, smem, place);
    TileWalk walk(params, blockIdx.x / kConfig.cluster_size());
    uint32_t turn_phase = warpgroup ^ 1;  // consumer 0 has the first turn
    if (kPingpong && warpgroup == 1) {
      walk.advance(params);
      mainloop.at.skip(stages(0));  // every tile has as many stages
    }
#pragma unroll 1
    while (!walk.done(params)) {
      OutputPlace at;
      typename Main::Accumulators acc;
      if (Out::prepares(maps)) output.prepare(output_place(params, walk, place, row));
      if constexpr (Main::kScales) mainloop.begin(output_place(params, walk, place, row));
      if constexpr (kPingpong) ptx::mbarrier_wait(smem.turn(warpgroup), turn_phase);
      mainloop.run(acc, stages(walk.batch), [&] {
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
      if constexpr (AddsParts<Program>) {
        if (SplitFixup<kConfig>(params, smem, walk.batch).run(acc)) {
          output.finish(acc, {at.row, at.column, 0});
        }
        break;
      } else if constexpr (kConfig.split_k > 1) {
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
