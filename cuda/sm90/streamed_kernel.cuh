// The kernel for few rows of A times an n-major 8-bit B. wgmma does not take such a B from shared
// memory. mma.sync takes it from registers, where the kernel transposes 4 x 4 bytes. The kernel
// reads B once. Its epilogue is compiled at run time (sm90/output/compiled.cuh).
//
// Roles: Each of four consumer warps multiplies a quarter of every stage's k by the whole tile. In
//        the one producer warp a single thread loads.
// Barriers: full[stage]: 1 arrival of the producer + the bytes of the stage. empty[stage]: 4 warps.
//        partial_full (split k): 1 + the bytes of all blocks' sums of this block's columns. Named
//        barrier 0: the barriers are initialised and the tile is known. Named barrier 4: the
//        consumers.
// Timeline, producer: initialise -> [groups: find the tile, write slot] -> TMA A, B ...
//        consumer: send for the epilogue's operands -> [wait full, multiply, arrive empty] ... ->
//        the warp's sums to shared memory, over the ring | consumers | the block's sums to the
//        blocks that finish them, by st.async -> wait partial_full -> add -> Program -> results.
// A block computes one tile. With two weights it computes one product after the other. A block
// waits for the start of the other blocks of its cluster before it sends sums. No block is written
// to after its end, because each waits for all sums that it is sent.
// Groups of rows: the grid has as many tiles as there may be. The producer's warp reads the sizes
// and tells the consumers through a slot which tile is theirs, if any (sm90/ragged.cuh).

#pragma once

#include <stdint.h>

#include "compiled_params.h"
#include "kernel_config.h"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/tma.cuh"
#include "scheduler/ragged.cuh"
#include "scheduler/raster.cuh"
#include "sm90/output/compiled.cuh"
#include "sm90/output/output_tile.h"
#include "sm90/producer.cuh"
#include "sm90/ragged.cuh"
#include "sm90/ring.cuh"
#include "sm90/streamed_loop.cuh"
#include "sm90/streamed_sums.cuh"
#include "sm90/tensor_maps.h"

namespace jax_tcgemm::sm90 {

template <KernelConfig kConfig, typename Program>
struct StreamedKernel {
  using Smem = SharedMemory<kConfig>;
  using Loop = StreamedLoop<kConfig>;
  using Out = CompiledOutput<kConfig, Program>;
  using Plan = typename Out::Plan;
  using Sums = StreamedSums<kConfig>;
  static constexpr int kStartBarrier = 0;
  static constexpr int kWarps = Sums::kWarps;
  static constexpr int kThreads = Sums::kThreads;
  static constexpr int kColumns = Sums::kColumns;
  static constexpr int kShare = Sums::kShare;
  static constexpr int kWeights = Sums::kWeights;
  static constexpr bool kGroups = kConfig.grouped == Grouped::kM;
  static constexpr int kNone = -1;  // in place of a group: there is no tile
  static_assert(kShare % kChunkColumns == 0 && Plan::kLength == kChunkColumns);

  const CompiledParams& params;
  const TensorMaps& maps;
  const Smem& smem;
  const ClusterPlace<kConfig> place;

  __device__ __forceinline__ Sums sums() const { return {smem, place.k}; }

  // Prefetches the operands of the warp's first values while B is loaded.
  __device__ __forceinline__ void prefetch(OutputPlace at) const {
    at.column += threadIdx.x / 32 * kChunkColumns;
    prefetch_operands<Program>(params, at);
  }

  // `at` holds the tile's first row and the first of the block's columns.
  __device__ __forceinline__ void finish(const Out& output, const OutputPlace& at) const {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const uint32_t buffers = smem.output(warp);
#pragma unroll 1
    for (int chunk = warp; chunk < kShare / kChunkColumns; chunk += kWarps) {
      const int column = chunk * kChunkColumns;
      CompiledIo<Plan> io = {
          params,   buffers,      buffers, at.row + lane / 4, at.column + column + lane % 4 * 2,
          at.batch, lane % 4 * 2, {}};
#pragma unroll
      for (int weight = 0; weight < kWeights; ++weight) sums().add(io.acc[weight], weight, column);
      Program::run(io);
      __syncwarp();
      output.store({at.row, at.column + column, at.batch});
      __syncwarp();
    }
  }

  // The block's tile. The block shares the tile's columns with its cluster.
  struct Tile {
    OutputPlace at;  // first row and column, and the matrix of B; kNone: there is no tile
    int row_end;     // end of the rows that the block may write
    int stages;      // in this block's part of k
  };

  __device__ __forceinline__ int k_tiles() const { return (params.k - 1) / kConfig.tile_k + 1; }
  static __device__ __forceinline__ int first_stage(int k_tiles, int part) {
    return part * k_tiles / kConfig.split_k;
  }
  __device__ __forceinline__ int stages() const {
    return first_stage(k_tiles(), place.k + 1) - first_stage(k_tiles(), place.k);
  }

  __device__ __forceinline__ Tile tile_of_grid() const {
    const TileWalk walk(params, blockIdx.x / kConfig.cluster_size());
    const TileCoordinate tile = raster_tile(params.raster, walk.index);
    return {{tile.tile_m * kConfig.tile_m, tile.tile_n * kColumns, walk.batch}, params.m, stages()};
  }

  // The producer's warp calls this.
  __device__ __forceinline__ Tile tile_of_groups() const {
    constexpr int kSize = kConfig.cluster_size();
    RaggedWalk<Grouped::kM, kConfig.tile_m, kColumns> walk(params, blockIdx.x / kSize,
                                                           gridDim.x / kSize);
    RaggedTile tile;
    if (!walk.next(&tile)) return {{0, 0, kNone}, 0, 0};
    const OutputPlace at = {tile.begin + tile.tile_m * kConfig.tile_m, tile.tile_n * kColumns,
                            tile.group};
    return {at, tile.end, tile.group == params.batch ? 0 : stages()};
  }

  __device__ __forceinline__ void publish(const Tile& tile) const {
    if (threadIdx.x % 32 != 0) return;
    RaggedSlot{tile.at.row, tile.row_end, tile.at.column, tile.at.batch, tile.stages, 0, 0, 0}
        .write(smem.tile_slot(0));
  }
  __device__ __forceinline__ Tile published() const {
    const RaggedSlot slot = RaggedSlot::read(smem.tile_slot(0));
    return {{slot.row, slot.column, slot.group}, slot.row_end, slot.stages};
  }

  __device__ __forceinline__ OutputPlace own_columns(const Tile& tile) const {
    return {tile.at.row, tile.at.column + place.k * kShare, tile.at.batch};
  }

  __device__ __forceinline__ void consume() const {
    Tile tile;
    if constexpr (!kGroups) {
      tile = tile_of_grid();
      prefetch(own_columns(tile));
    }
    ptx::named_barrier_sync(kStartBarrier, kThreads + 32);
    if constexpr (kGroups) {
      tile = published();
      if (tile.at.batch == kNone) return;
      prefetch(own_columns(tile));
    }
    multiply(tile);
    Out output(params, maps, smem, 0);
    output.limit_rows(tile.row_end);
    finish(output, own_columns(tile));
  }

  // Multiplies until the sums of the block's columns lie in its shared memory.
  __device__ __forceinline__ void multiply(const Tile& tile) const {
    RingPosition<kConfig.stages> at;
#pragma unroll 1
    for (int weight = 0; weight < kWeights; ++weight) {
      typename Loop::Accumulators acc = {};
#pragma unroll 1
      for (int left = tile.stages; left > 0; --left, at.advance()) {
        ptx::mbarrier_wait(smem.full(at.stage), at.phase);
        Loop::multiply(acc, smem.a(at.stage), smem.b(at.stage), threadIdx.x / 32);
        __syncwarp();
        if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(smem.empty(at.stage));
      }
      // After the barrier, no warp still reads the ring or the other weight's partial sums.
      ptx::named_barrier_sync(kConsumerBarrier, kThreads);
      sums().write_partials(acc);
      ptx::named_barrier_sync(kConsumerBarrier, kThreads);
      if (kConfig.split_k > 1 && weight == 0) ptx::cluster_wait();
      sums().send(weight);
    }
    if constexpr (kConfig.split_k > 1) {
      ptx::mbarrier_wait_cluster(smem.partial_full(), 0);
    } else {
      ptx::named_barrier_sync(kConsumerBarrier, kThreads);
    }
  }

  __device__ __forceinline__ void init_barriers() const {
    for (int stage = 0; stage < kConfig.stages; ++stage) {
      ptx::mbarrier_init(smem.full(stage), 1);
      ptx::mbarrier_init(smem.empty(stage), kWarps);
    }
    if constexpr (kConfig.split_k > 1) {
      ptx::mbarrier_init(smem.partial_full(), 1);
      ptx::mbarrier_arrive_expect(smem.partial_full(), Sums::kReceived);
    }
    ptx::fence_mbarrier_init();
  }

  // One thread calls this.
  __device__ __forceinline__ void produce(const Tile& tile) const {
    const bool many = !kGroups && params.batch_rank > 1;
    const int rows = loaded_rows(kConfig, params.m, kConfig.tile_m, 1);
    const int stage_bytes = (rows + kColumns) * kConfig.tile_k;
    const auto [row, column, batch] = tile.at;
    OperandLoader<kConfig, kConfig.tile_m, Major::kK, 1> a = {&maps.a, many, 0, 0, row, {}};
    OperandLoader<kConfig, kColumns, Major::kMn, 1> b = {&maps.b, many, 0, 0, column, {}};
    if constexpr (kGroups) {
      b.batch.z = batch;
    } else if constexpr (Program::kBatched) {
      a.batch = batch_coordinates(params, batch, maps.a_moves);
      b.batch = batch_coordinates(params, batch, maps.b_moves);
    }
    const int first = first_stage(k_tiles(), place.k);
    RingPosition<kConfig.stages> at;
#pragma unroll 1
    for (int weight = 0; weight < kWeights; ++weight) {
      if (weight == 1) b.map = &maps.b2;
#pragma unroll 1
      for (int i = 0; i < tile.stages; ++i, at.advance()) {
        ptx::mbarrier_wait(smem.empty(at.stage), at.phase ^ 1);
        ptx::mbarrier_arrive_expect(smem.full(at.stage), stage_bytes);
        b.load(smem.b(at.stage), smem.full(at.stage), (first + i) * kConfig.tile_k);
        a.load(smem.a(at.stage), smem.full(at.stage), (first + i) * kConfig.tile_k);
      }
    }
  }

  static __device__ __forceinline__ void run(const CompiledParams& params, const TensorMaps& maps,
                                             const Smem& smem) {
    const StreamedKernel kernel = {params, maps, smem, {}};
    const int warp = threadIdx.x / 32;
    if (warp == kWarps) {
      if (threadIdx.x % 32 == 0) kernel.init_barriers();
      __syncwarp();
      if constexpr (kConfig.split_k > 1) ptx::cluster_arrive_relaxed();
      Tile tile;
      if constexpr (kGroups) {
        tile = kernel.tile_of_groups();
        kernel.publish(tile);
        __syncwarp();
      } else {
        tile = kernel.tile_of_grid();
      }
      ptx::named_barrier_arrive(kStartBarrier, kThreads + 32);
      if (threadIdx.x % 32 == 0) kernel.produce(tile);
      __syncwarp();
      if constexpr (kConfig.split_k > 1) ptx::cluster_wait();
    } else {
      if (warp == 0) ptx::prefetch_tensor_map(&maps.a);
      if (warp == 1) ptx::prefetch_tensor_map(&maps.b);
      if constexpr (kConfig.split_k > 1) ptx::cluster_arrive_relaxed();
      kernel.consume();
    }
  }
};

}  // namespace jax_tcgemm::sm90
