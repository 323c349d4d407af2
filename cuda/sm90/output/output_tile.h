// How D leaves an sm90 kernel: a warp writes its 16 rows of a sub-tile to shared memory, and TMA
// stores them from there. The kernel and the host code that describes D to TMA share this file.

#ifndef JAX_TCGEMM_SM90_OUTPUT_OUTPUT_TILE_H_
#define JAX_TCGEMM_SM90_OUTPUT_OUTPUT_TILE_H_

#include <stdint.h>

#include "kernel_config.h"

namespace jax_tcgemm::sm90 {

// Returns how many rows of a k-major operand TMA loads for a tile. An 8-bit operand may have fewer
// rows than the tile; TMA then loads few rows beyond the operand. The kernel multiplies the
// remaining content of shared memory into rows or columns that D does not have. A skinny kernel
// waits for whole tiles, which are small.
constexpr int loaded_rows(const KernelConfig& config, int extent, int tile, int sharers) {
  const bool is_few = element_bytes(config.algorithm) == 1 && config.grouped == Grouped::kNone &&
                      !config.skinny && sharers == 1 && extent < tile;
  return is_few ? (extent + 7) / 8 * 8 : tile;
}

// Rows of accumulators that a warpgroup computes with one instruction, and rows of each of its
// warps.
constexpr int kBlockRows = 64;
constexpr int kWarpRows = 16;

// Bulk copies take multiples of this many bytes, from and to addresses that are multiples of it.
constexpr int kGranule = 16;

// The box that a warp stores: rows of D, and bytes of a row, which also give the swizzle. If the
// operands are swapped (see below), the warp's rows are columns of D. In a row of the table that
// always swaps, the box is a warpgroup's.
struct OutputBox {
  int rows;
  int row_bytes;
};

// Returns the box. Long rows are quicker to store. Short rows leave room for C and further results.
constexpr OutputBox output_box(const KernelConfig& config, int element_bytes, bool swap_ab,
                               bool whole_rows) {
  if (config.swap_ab) return {config.transposed_rows(), kBlockRows * element_bytes};
  if (swap_ab) return {32, kWarpRows * element_bytes};
  const bool whole =
      whole_rows && config.output_n() % 64 == 0 && config.staging_bytes() >= 2 * kBlockRows * 128;
  return {kWarpRows, whole ? 128 : 64};
}

// Checks if a kernel computes D^T = B^T A^T. wgmma takes only k-major float32 operands from shared
// memory. If A is k-major and B is not, B^T can go through registers. Some rows of the table swap
// 16-bit operands.
constexpr bool swaps_operands(const KernelConfig& config, Major major_a, Major major_b) {
  if (config.swap_ab) return true;
  return config.arch == Arch::kSm90 && element_bytes(config.algorithm) == 4 &&
         major_a == Major::kK && major_b == Major::kMn;
}

// Checks if a configuration computes a problem as D^T.
inline bool swaps_operands(const KernelConfig& config, Major major_a, Major major_b, int64_t m,
                           int64_t n) {
  return config.skinny ? m < n : swaps_operands(config, major_a, major_b);
}

// Checks if the kernel transposes B. If neither float32 operand is k-major, A goes through
// registers, and the kernel transposes B's tiles into two buffers that replace a stage of the ring.
constexpr bool transposes_b(const KernelConfig& config, Major major_a, Major major_b) {
  return config.arch == Arch::kSm90 && element_bytes(config.algorithm) == 4 &&
         major_a == Major::kMn && major_b == Major::kMn;
}

constexpr bool can_transpose_b(const KernelConfig& config) {
  return config.schedule == Schedule::kCooperative && config.stages > 3 &&
         2 * config.tile_n * 128 <= config.stage_bytes();
}

constexpr int ring_stages(const KernelConfig& config, Major major_a, Major major_b) {
  return config.stages - (transposes_b(config, major_a, major_b) ? 1 : 0);
}

}  // namespace jax_tcgemm::sm90

#endif  // JAX_TCGEMM_SM90_OUTPUT_OUTPUT_TILE_H_
