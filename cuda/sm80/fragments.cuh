// Register fragments: a warp's part of an operand tile for one mma.sync step.
//
// An mma step takes 32 bytes of k: 16 elements of 16 bits or 8 of tf32. A register of mma.sync
// holds two neighbouring k of 16 bits, or one k of tf32:
//   k-major              ldmatrix (a row of 16 bytes may as well be four tf32)
//   mn-major, 16 bits    ldmatrix.trans
//   mn-major, tf32       32-bit loads; wider ones would fill registers in the wrong order

#pragma once

#include <stdint.h>

#include "mma_sync/operand_tile.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/shared_memory.cuh"

namespace jax_tcgemm::sm80 {

// `base` is the stage's address plus lane_offset(), this lane's place in a stage at step 0 and mma
// tile 0. Other steps and tiles differ from it by a constant. The constant is added, or XORed if it
// falls into the swizzled bits. Extents of a warp's part are powers of two and stages start on 128
// bytes, so no bit is changed twice.

// A: (warp_m, 32 bytes of k) -> one fragment of 4 registers for each 16 rows.
template <typename Tile, Major kMajor, int kWarpM>
struct FragmentA {
  static constexpr int kMmaTiles = kWarpM / 16;
  static_assert((kMmaTiles & (kMmaTiles - 1)) == 0);
  static constexpr int kRowBytes = Tile::kChunks * 16;

  uint32_t reg[kMmaTiles][4];

  static __device__ __forceinline__ uint32_t lane_offset(int first_row) {
    const int lane = threadIdx.x % 32;
    if constexpr (kMajor == Major::kK) {
      return Tile::offset(first_row + lane % 16, lane / 16);
    } else if constexpr (!Tile::kIsTf32) {
      return Tile::offset(lane % 8 + lane / 16 * 8, first_row / 8 + lane / 8 % 2);
    } else {
      return Tile::offset(lane % 4, first_row / 4 + lane / 16) + lane / 4 % 4 * 4;
    }
  }

  // Does one of the kLoads loads of each lane for mma step `step`; `index` < kLoads.
  static constexpr int kLoads = kMmaTiles * (kMajor == Major::kMn && Tile::kIsTf32 ? 4 : 1);
  __device__ __forceinline__ void load(uint32_t base, int step, int index) {
    if constexpr (kMajor == Major::kK) {
      ptx::ldmatrix_x4(reg[index], (base ^ (step * 32)) + index * 16 * kRowBytes);
    } else if constexpr (!Tile::kIsTf32) {
      ptx::ldmatrix_x4_trans(reg[index], (base ^ (index * 32)) + step * 16 * kRowBytes);
    } else {
      const int i = index / 4;
      const int r = index % 4;  // (g + 8 * (r % 2), t + 4 * (r / 2))
      reg[i][r] =
          ptx::load_shared_4((base ^ ((i * 4 + r % 2 * 2) % 8 * 16)) +
                             (i * 4 + r % 2 * 2) / 8 * 128 + (step * 8 + r / 2 * 4) * kRowBytes);
    }
  }
};

// B: (32 bytes of k, warp_n) -> one fragment of 2 registers for each 8 columns.
template <typename Tile, Major kMajor, int kWarpN>
struct FragmentB {
  static constexpr int kMmaTiles = kWarpN / 8;
  static_assert((kMmaTiles & (kMmaTiles - 1)) == 0);
  static constexpr int kRowBytes = Tile::kChunks * 16;

  uint32_t reg[kMmaTiles][2];

  static __device__ __forceinline__ uint32_t lane_offset(int first_column) {
    const int lane = threadIdx.x % 32;
    if constexpr (kMajor == Major::kK) {
      return Tile::offset(first_column + lane % 8 + lane / 16 * 8, lane / 8 % 2);
    } else if constexpr (!Tile::kIsTf32) {
      return Tile::offset(lane % 16, first_column / 8 + lane / 16);
    } else {
      return Tile::offset(lane % 4, first_column / 4 + lane / 16) + lane / 4 % 4 * 4;
    }
  }

  // Does one of the kLoads loads of each lane for mma step `step`; `index` < kLoads.
  static constexpr bool kScalarLoads = kMajor == Major::kMn && Tile::kIsTf32;
  static constexpr int kLoads = kScalarLoads ? kMmaTiles * 2 : kMmaTiles / 2;
  __device__ __forceinline__ void load(uint32_t base, int step, int index) {
    if constexpr (kScalarLoads) {
      const int j = index / 2;
      const int r = index % 2;  // (t + 4 * r, g)
      reg[j][r] = ptx::load_shared_4((base ^ (j * 2 % 8 * 16)) + j * 2 / 8 * 128 +
                                     (step * 8 + r * 4) * kRowBytes);
    } else {
      const int j = index * 2;
      uint32_t value[4];
      if constexpr (kMajor == Major::kK) {
        ptx::ldmatrix_x4(value, (base ^ (step * 32)) + j * 8 * kRowBytes);
      } else {
        ptx::ldmatrix_x4_trans(value, (base ^ (j * 16)) + step * 16 * kRowBytes);
      }
      reg[j][0] = value[0];
      reg[j][1] = value[1];
      reg[j + 1][0] = value[2];
      reg[j + 1][1] = value[3];
    }
  }
};

}  // namespace jax_tcgemm::sm80
