// The kernels for packed weights (sm90/packed/kernel.cuh): what one is compiled for, and its
// parameters. They compute D (m, n) = x (m, k) * W (k, n), where a weight is (u - zero) * scale.
// jax_tcgemm/lowering/packed_layout.py describes the layout of the weight.

#ifndef JAX_TCGEMM_PACKED_CONFIG_H_
#define JAX_TCGEMM_PACKED_CONFIG_H_

#include <stdint.h>

#include "arithmetic.h"

namespace jax_tcgemm {

enum class PackedFormat { kInt4, kUint4, kInt8, kE4m3 };

// Extent of a tile of the layout along n and along k.
constexpr int kPackedTile = 64;
// A scale applies to at most this many k of a sum.
constexpr int kMostPackedUnit = 128;

struct PackedConfig {
  PackedFormat format;
  ElementType activation;  // kBf16 or kF16, the type in which weights are multiplied
  ElementType scale;       // kBf16, kF16 or kF32; of the zero points, too
  ElementType output;      // kBf16, kF16 or kF32
  bool has_zeros;
  int group;               // rows of W that share a scale: 32, 64, 128, or all of a stage
  int tokens;              // rows of x in a tile
  int row_blocks;          // blocks of 64 columns of W in a tile
  int k_blocks;            // blocks of 64 k in a stage
  int stages;              // of the ring
  int split_k;             // blocks of a cluster that divide k
  int blocks_on_sm;        // for which registers suffice
  bool is_ragged = false;  // groups of consecutive rows of x have a weight each
  int weights = 1;         // 2: x is multiplied by two, and a function gets both products

  constexpr int bits() const {
    return format == PackedFormat::kInt4 || format == PackedFormat::kUint4 ? 4 : 8;
  }
  // Few rows go through mma.sync, and scales multiply sums. More rows go through wgmma, and scales
  // multiply the weights, which rounds once more.
  constexpr bool uses_wgmma() const { return tokens > 16; }
  constexpr int stage_k() const { return kPackedTile * k_blocks; }
  constexpr int stage_groups() const { return group < stage_k() ? stage_k() / group : 1; }
  constexpr int unit() const { return group < kMostPackedUnit ? group : kMostPackedUnit; }

  constexpr int tile_bytes() const { return kPackedTile * kPackedTile * bits() / 8; }
  constexpr int thread_bytes() const { return tile_bytes() / 128; }
  constexpr int row_block_bytes() const { return k_blocks * tile_bytes(); }
  constexpr int x_tile_bytes() const { return tokens * 128; }
  constexpr int x_bytes() const { return k_blocks * x_tile_bytes(); }
  constexpr int scale_row_bytes() const { return kPackedTile * element_bytes(scale); }
  constexpr int group_bytes() const { return scale_row_bytes() * (has_zeros ? 2 : 1); }
  constexpr int scale_block_bytes() const { return stage_groups() * group_bytes(); }
  constexpr int weights_offset() const { return x_bytes(); }
  constexpr int scales_offset() const { return x_bytes() + row_blocks * row_block_bytes(); }
  constexpr int stage_bytes() const {
    return (scales_offset() + row_blocks * scale_block_bytes() + 1023) / 1024 * 1024;
  }
  constexpr int consumer_warps() const { return 4 * row_blocks; }
  // One warp loads the weights, another the rest.
  constexpr int threads() const { return 32 * (consumer_warps() + 2); }
  constexpr int rows() const { return kPackedTile * row_blocks; }
  // Blocks and columns of D in a tile.
  constexpr int output_blocks() const { return row_blocks / weights; }
  constexpr int columns() const { return kPackedTile * output_blocks(); }
  // The sums of a tile, (tokens, rows), lie where the ring was. The gap avoids bank conflicts.
  constexpr int sums_pitch() const { return rows() + 4; }
  constexpr int ring_bytes() const {
    const int ring = stages * stage_bytes();
    const int sums = tokens * sums_pitch() * 4;
    return ring > sums ? ring : sums;
  }
  // The ring begins at a multiple of 1024, the barriers follow.
  constexpr int shared_bytes() const { return 1024 + ring_bytes() + 16 * stages; }
};

struct PackedParams {
  const uint8_t* values;
  const uint8_t* scales;
  void* d;
  int32_t m, n;
  int32_t token_tiles;       // they follow each other in the grid, because they read the same W
  int32_t k_tiles;           // blocks of 64 k; k is a multiple of 64
  int32_t groups;            // along k
  int32_t stages_per_group;  // more than 1 if a group is longer than a stage
  int32_t by_vectors;        // whether 4 columns of D are contiguous, aligned, and inside together
  int64_t values_batch;      // bytes from one matrix to the next; 0 if there is one weight
  int64_t scales_batch;
  // If ragged: rows of x of each of `experts` weights. Rows of D behind them are 0.
  const int32_t* group_sizes;
  int32_t experts;
  // The second of two weights.
  const uint8_t* values2;
  const uint8_t* scales2;
};

// The parameters of the pass that dequantizes a weight into W (n, k): sm90/packed/unpack.cuh.
struct UnpackParams {
  const uint8_t* values;
  const uint8_t* scales;
  void* w;
  int32_t n, k_tiles, groups;
  int32_t group;  // a multiple of 16, or all k
  int64_t values_batch, scales_batch;
};

// Tiles of 64 k of a block of that pass, and its threads.
constexpr int kUnpackTiles = 2;
constexpr int kUnpackThreads = kUnpackTiles * 128;

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_PACKED_CONFIG_H_
