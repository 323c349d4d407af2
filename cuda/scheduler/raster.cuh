// Tile order. Consecutive blocks run at the same time, so their tiles should share rows of A and
// columns of B in L2. Tiles form groups of `width` tile rows (or columns). The order inside a group
// is column after column.

#pragma once

#include <stdint.h>

#include "gemm_params.h"

namespace jax_tcgemm {

struct TileCoordinate {
  int tile_m;  // index of the tile along m
  int tile_n;  // index of the tile along n
};

__device__ __forceinline__ TileCoordinate raster_tile(const Raster& raster, int index) {
  const int group = raster.tiles_per_group.divide(index);
  const int rest = index - group * raster.tiles_per_group.divisor;
  const FastDivisor& width = group == raster.last_group ? raster.last_width : raster.width;
  const int major = width.divide(rest);
  const int minor = group * raster.width.divisor + rest - major * width.divisor;
  const bool along_m = raster.order == RasterOrder::kAlongM;
  return {along_m ? minor : major, along_m ? major : minor};
}

// The tiles of one block of a persistent grid: the tile with the block's number, then those at the
// grid's stride, over all batches. A cluster counts as one block.
struct TileWalk {
  int index;  // of the tile in its matrix
  int batch;  // >= params.batch: no tile left

  __device__ __forceinline__ explicit TileWalk(const GemmParams& params, int first = blockIdx.x)
      : batch(params.raster.tiles.divide(first)) {
    index = first - batch * params.raster.tiles.divisor;
  }

  __device__ __forceinline__ bool done(const GemmParams& params) const {
    return batch >= params.batch;
  }

  __device__ __forceinline__ void advance(const GemmParams& params) {
    index += params.raster.stride_index;
    batch += params.raster.stride_batch;
    if (index >= params.raster.tiles.divisor) {
      index -= params.raster.tiles.divisor;
      ++batch;
    }
  }
};

// Returns the offset in elements of flat batch index `batch` in an operand with its own strides.
__device__ __forceinline__ int64_t batch_offset(const GemmParams& params, int batch,
                                                const BatchStrides& strides) {
  if (params.batch_rank == 0) return 0;
  int64_t offset = 0;
#pragma unroll
  for (int i = kMaxBatchRank - 1; i > 0; --i) {
    if (i < params.batch_rank) {
      const int outer = batch / params.batch_shape[i];
      offset += (batch - outer * params.batch_shape[i]) * strides.stride[i];
      batch = outer;
    }
  }
  return offset + batch * strides.stride[0];
}

// The same for a kernel that is compiled for one product and knows if there is a batch. The code
// for a batch takes about 130 instructions for each operand.
template <bool kBatched>
__device__ __forceinline__ int64_t batch_offset_if(const GemmParams& params, int batch,
                                                   const BatchStrides& strides) {
  if constexpr (!kBatched) return 0;
  return batch_offset(params, batch, strides);
}

}  // namespace jax_tcgemm
