// How D leaves an sm90 kernel: a warp writes its 16 rows of a sub-tile to shared memory, from where
// TMA stores them. Known to the kernel and to the host code that describes D to TMA.

#ifndef JAX_TCGEMM_SM90_OUTPUT_OUTPUT_TILE_H_
#define JAX_TCGEMM_SM90_OUTPUT_OUTPUT_TILE_H_

#include <stdint.h>

#include "kernel_config.h"

namespace jax_tcgemm::sm90 {

// Rows of a k-major operand that are loaded for a tile: of an operand of 8 bits that has fewer than
// the tile, as activations have in decoding, not many more. What shared memory holds beyond them is
// multiplied into rows or columns that D has not.
constexpr int loaded_rows(const KernelConfig& config, int extent, int tile, int sharers) {
  const bool is_few = element_bytes(config.algorithm) == 1 && config.grouped == Grouped::kNone &&
                      sharers == 1 && extent < tile;
  return is_few ? (extent + 7) / 8 * 8 : tile;
}

// Rows of accumulators that a warpgroup computes with one instruction; those of each of its warps.
constexpr int kBlockRows = 64;
constexpr int kWarpRows = 16;

// Bytes of which bulk copies take whole multiples, from and to multiples of as many.
constexpr int kGranule = 16;

// The box that a warp stores: rows of D and bytes of a row, which is also the swizzle. Swapped
// (see below), the warp's rows are columns of D; of a row of the table that always swaps, the
// box is a warpgroup's.
struct OutputBox {
  int rows;
  int row_bytes;
};

// Long rows are quicker to store; short ones leave room for C and for further results.
constexpr OutputBox output_box(const KernelConfig& config, int element_bytes, bool swap_ab,
                               bool whole_rows) {
  if (config.swap_ab) return {config.transposed_rows(), kBlockRows * element_bytes};
  if (swap_ab) return {32, kWarpRows * element_bytes};
  const bool whole =
      whole_rows && config.output_n() % 64 == 0 && config.staging_bytes() >= 2 * kBlockRows * 128;
  return {kWarpRows, whole ? 128 : 64};
}

// With float32 operands, of which wgmma takes only k-major ones from shared memory, D^T = B^T A^T
// is computed where A is k-major and B is not: then B^T can go through registers. Of 16-bit ones it
// is by some rows of the table.
constexpr bool swaps_operands(const KernelConfig& config, Major major_a, Major major_b) {
  if (config.swap_ab) return true;
  return config.arch == Arch::kSm90 && element_bytes(config.algorithm) == 4 &&
         major_a == Major::kK && major_b == Major::kMn;
}

// Whether a problem is computed as D^T by a configuration.
inline bool swaps_operands(const KernelConfig& config, Major major_a, Major major_b, int64_t m,
                           int64_t n) {
  return config.skinny ? m < n : swaps_operands(config, major_a, major_b);
}

// Where neither is k-major, A goes through registers and B's tiles are transposed, into two buffers
// that take the place of a stage of the ring.
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
