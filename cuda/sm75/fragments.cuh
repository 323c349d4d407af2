// Register fragments: a warp's part of an operand tile for one step of mma.sync, 8 elements of k.
//
// A and B have the same form: 8 x 8 matrices of 8 rows of A or 8 columns of B. A lane holds two
// neighbouring k of row (column) lane / 4. ldmatrix reads four matrices at once. Its transposing
// form reads mn-major operands.

#pragma once

#include <stdint.h>

#include "kernel_config.h"
#include "ptx/ldmatrix.cuh"

namespace jax_tcgemm::sm75 {

// kExtent rows of A or columns of B. `base` is the stage's address plus lane_offset(), this lane's
// place at step 0. Other steps and matrices differ from it by a constant. The constant is added, or
// XORed if it falls into the swizzled bits. Extents of a warp's part are powers of two and stages
// start on 128 bytes, so no bit is changed twice.
template <typename Tile, Major kMajor, int kExtent>
struct Fragment {
  static constexpr int kMatrices = kExtent / 8;
  static_assert(kMatrices % 4 == 0 && (kMatrices & (kMatrices - 1)) == 0);
  static constexpr int kRowBytes = Tile::kChunks * 16;

  uint32_t reg[kMatrices];

  // `first`: first of the warp's rows or columns in the tile.
  static __device__ __forceinline__ uint32_t lane_offset(int first) {
    const int lane = threadIdx.x % 32;
    if constexpr (kMajor == Major::kK) {
      return Tile::offset(first + lane, 0);
    } else {
      return Tile::offset(lane % 8, first / 8 + lane / 8);
    }
  }

  __device__ __forceinline__ void load(uint32_t base, int step) {
#pragma unroll
    for (int i = 0; i < kMatrices; i += 4) {
      uint32_t (&four)[4] = reinterpret_cast<uint32_t (&)[4]>(reg[i]);
      if constexpr (kMajor == Major::kK) {
        ptx::ldmatrix_x4(four, (base ^ (step * 16)) + i * 8 * kRowBytes);
      } else {
        ptx::ldmatrix_x4_trans(four, (base ^ (i * 16)) + step * 8 * kRowBytes);
      }
    }
  }
};

}  // namespace jax_tcgemm::sm75
