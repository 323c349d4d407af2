// Which tile a block of sm90/streamed_kernel.cuh computes: one of a grid that has a block for each,
// or of groups of rows whose sizes only the device knows, of a grid that has one for each there may
// be.

#pragma once

#include <stdint.h>

#include "gemm_params.h"
#include "kernel_config.h"
#include "scheduler/ragged.cuh"
#include "scheduler/raster.cuh"
#include "sm90/output/output_tile.h"
#include "sm90/ragged.cuh"
#include "sm90/ring.cuh"

namespace jax_tcgemm::sm90 {

// Its columns are shared by a cluster.
struct StreamedTile {
  static constexpr int kNone = -1;

  OutputPlace at;  // the first row and column, and the matrix of B: kNone where there is no tile
  int row_end;     // of the rows it may write
  int stages;      // of the block's part of k

  __device__ __forceinline__ bool exists() const { return at.batch != kNone; }
};

template <KernelConfig kConfig>
struct StreamedTiles {
  static constexpr int kSize = kConfig.cluster_size();
  static constexpr int kColumns = kConfig.output_n();

  const GemmParams& params;
  const SharedMemory<kConfig>& smem;
  const ClusterPlace<kConfig>& place;

  // Of the block's part of k.
  __device__ __forceinline__ int first_stage() const { return first_stage(place.k); }
  __device__ __forceinline__ int stages() const {
    return first_stage(place.k + 1) - first_stage(place.k);
  }

  __device__ __forceinline__ StreamedTile of_grid() const {
    const TileWalk walk(params, blockIdx.x / kSize);
    const TileCoordinate tile = raster_tile(params.raster, walk.index);
    return {{tile.tile_m * kConfig.tile_m, tile.tile_n * kColumns, walk.batch}, params.m, stages()};
  }

  // By a warp.
  __device__ __forceinline__ StreamedTile of_groups() const {
    RaggedWalk<Grouped::kM, kConfig.tile_m, kColumns> walk(params, blockIdx.x / kSize,
                                                           gridDim.x / kSize);
    RaggedTile tile;
    if (!walk.next(&tile)) return {{0, 0, StreamedTile::kNone}, 0, 0};
    const OutputPlace at = {tile.begin + tile.tile_m * kConfig.tile_m, tile.tile_n * kColumns,
                            tile.group};
    // Rows of no group are the function of zeros.
    return {at, tile.end, tile.group == params.batch ? 0 : stages()};
  }

  // By a warp; between this and what reads it a barrier.
  __device__ __forceinline__ void publish(const StreamedTile& tile) const {
    if (threadIdx.x % 32 != 0) return;
    RaggedSlot{tile.at.row, tile.row_end, tile.at.column, tile.at.batch, tile.stages, 0, 0, 0}
        .write(smem.tile_slot(0));
  }
  __device__ __forceinline__ StreamedTile published() const {
    const RaggedSlot slot = RaggedSlot::read(smem.tile_slot(0));
    return {{slot.row, slot.column, slot.group}, slot.row_end, slot.stages};
  }

 private:
  __device__ __forceinline__ int first_stage(int part) const {
    return part * ((params.k - 1) / kConfig.tile_k + 1) / kConfig.split_k;
  }
};

}  // namespace jax_tcgemm::sm90
