// The end of a tile of mma.sync if the epilogue was compiled at run time: a Program
// (epilogue/compiled_output.cuh) gets a warp's sums. This class replaces WarpOutput.

#pragma once

#include <stdint.h>

#include "compiled_params.h"
#include "epilogue/accumulator_chunk.cuh"
#include "epilogue/compiled_output.cuh"
#include "kernel_config.h"
#include "mma_sync/accumulators.cuh"
#include "scheduler/raster.cuh"

namespace jax_tcgemm::mma_sync {

template <KernelConfig kConfig, typename Program>
struct WarpFunction {
  using Accumulators = WarpAccumulators<kConfig>;
  using Output = CompiledWarpOutput<kConfig, Program>;
  using Slab = uint32_t;  // address in shared memory

  static __device__ __forceinline__ void finish(const CompiledParams& params, const TileWalk& walk,
                                                int warp_row, int warp_column,
                                                const Accumulators& acc, Slab slab) {
    const TileCoordinate tile = raster_tile(params.raster, walk.index);
    const OutputPlace place = {tile.tile_m * kConfig.tile_m + warp_row,
                               tile.tile_n * kConfig.tile_n + warp_column, walk.batch};
    if (place.row >= params.m || place.column >= params.n) return;
    // Two tiles of 8 columns are the values of a thread in 16.
    using Sums = const typename Output::Accumulators;
    static_assert(sizeof(Sums) == sizeof(acc.tile));
    const void* const tiles = acc.tile;
    Output(params, slab).finish(*static_cast<Sums*>(tiles), place);
  }
};

}  // namespace jax_tcgemm::mma_sync
