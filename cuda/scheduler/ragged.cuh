// Tile order if groups divide a dimension by sizes that only the device knows. Groups come one
// after the other; tiles within a group follow scheduler/raster.cuh, so that consecutive blocks
// share operands.
//
// Any sizes are valid: a negative size counts as 0, and no group extends beyond the existing rows.

#pragma once

#include <stdint.h>

#include "gemm_params.h"
#include "kernel_config.h"

namespace jax_tcgemm {

// Rows of D in a strip of tiles. The walk visits a strip column after column.
constexpr int kRaggedStripRows = 2048;

struct RaggedTile {
  int group;  // groups of rows: the number of groups for rows that belong to none
  int begin;  // begin of the group in the divided dimension
  int end;
  int tile_m;  // index of the tile in the group's matrix
  int tile_n;
};

// The tiles of one cluster of a persistent grid: the tile with the cluster's number, then every
// `stride`-th. A whole warp walks, and its lanes look at 32 groups at a time. kTileM and kTileN are
// extents of a cluster's tile.
template <Grouped kGrouped, int kTileM, int kTileN>
class RaggedWalk {
 public:
  __device__ __forceinline__ RaggedWalk(const GemmParams& params, int first, int stride)
      : params_(params),
        index_(first - stride),
        stride_(stride),
        tiles_n_((params.n - 1) / kTileN + 1) {
    look();
  }

  // Advances to the next tile. Returns false if none is left.
  __device__ __forceinline__ bool next(RaggedTile* tile) {
    index_ += stride_;
    uint32_t later = __ballot_sync(kAll, index_ < tile_end_);
    while (later == 0) {
      if (first_group_ + 32 >= groups()) return false;
      first_group_ += 32;
      before_ = __shfl_sync(kAll, end_, 31);
      tiles_before_ = __shfl_sync(kAll, tile_end_, 31);
      look();
      later = __ballot_sync(kAll, index_ < tile_end_);
    }
    const int holder = __ffs(later) - 1;
    tile->group = first_group_ + holder;
    tile->begin = __shfl_sync(kAll, begin_, holder);
    tile->end = __shfl_sync(kAll, end_, holder);
    place(tile, index_ - __shfl_sync(kAll, tile_begin_, holder));
    return true;
  }

 private:
  static constexpr uint32_t kAll = 0xffffffff;

  // Rows that belong to no group count as one more group.
  __device__ __forceinline__ int groups() const {
    return params_.batch + (kGrouped == Grouped::kM ? 1 : 0);
  }
  __device__ __forceinline__ uint32_t extent() const {
    return kGrouped == Grouped::kM ? params_.m : params_.k;
  }
  __device__ __forceinline__ int tiles_m(int begin, int end) const {
    return ((kGrouped == Grouped::kM ? end - begin : params_.m) + kTileM - 1) / kTileM;
  }

  // Returns the sum over the lanes up to this one, capped at `limit`, which is below 2^31.
  static __device__ __forceinline__ uint32_t scan(uint32_t value, uint32_t limit) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const uint32_t other = __shfl_up_sync(kAll, value, distance);
      if (lane >= distance) value = min(value + other, limit);
    }
    return value;
  }

  // Looks at 32 groups, one for each lane.
  __device__ __forceinline__ void look() {
    const int lane = threadIdx.x % 32;
    const int group = first_group_ + lane;
    uint32_t size = 0;
    if (group < params_.batch) {
      size = min(static_cast<uint32_t>(max(params_.group_sizes[group], 0)), extent());
    } else if (kGrouped == Grouped::kM && group == params_.batch) {
      size = extent();
    }
    end_ = min(before_ + scan(size, extent()), extent());
    begin_ = __shfl_up_sync(kAll, end_, 1);
    if (lane == 0) begin_ = before_;
    const int tiles = group < groups() ? tiles_m(begin_, end_) * tiles_n_ : 0;
    tile_end_ = tiles_before_ + scan(tiles, INT32_MAX);
    tile_begin_ = tile_end_ - tiles;
  }

  __device__ __forceinline__ void place(RaggedTile* tile, int index) const {
    constexpr int kWidth = kTileM < kRaggedStripRows ? kRaggedStripRows / kTileM : 1;
    const int strip = index / (kWidth * tiles_n_);
    const int rest = index - strip * kWidth * tiles_n_;
    const int width = min(kWidth, tiles_m(tile->begin, tile->end) - strip * kWidth);
    tile->tile_n = rest / width;
    tile->tile_m = strip * kWidth + rest - tile->tile_n * width;
  }

  const GemmParams& params_;
  int index_;  // of the tile among the tiles of all groups
  const int stride_;
  const int tiles_n_;
  int first_group_ = 0;  // of the 32 groups in view
  uint32_t before_ = 0;  // where first_group_ begins
  int tiles_before_ = 0;
  // Range and tiles of this lane's group.
  int begin_, end_;
  int tile_begin_, tile_end_;
};

}  // namespace jax_tcgemm
