// The place of a 16-byte chunk of an operand tile in shared memory.
//
// A stage of an operand is (rows, chunks): rows of the strided dimension, `chunks` 16-byte pieces
// of the contiguous one, without padding. A chunk is stored at column `chunk ^ key(row)`. The key
// sends the eight rows that one warp-wide access touches to different banks. These eight rows
// depend on how the operand's fragments are read (sm80/fragments.cuh), so the pattern has its
// reader's name.

#pragma once

#include <stdint.h>

namespace jax_tcgemm {

enum class SmemSwizzle {
  kEightRows,         // rows r .. r + 7, one chunk each: ldmatrix
  kFourRowsTwoChunks  // rows r .. r + 3, two neighbouring chunks each: 32-bit loads of tf32
};

template <SmemSwizzle kSwizzle, int kChunks>
__device__ __forceinline__ int swizzle_key(int row) {
  static_assert(kChunks == 2 || kChunks == 4 || kChunks % 8 == 0);
  if constexpr (kSwizzle == SmemSwizzle::kFourRowsTwoChunks) {
    static_assert(kChunks % 8 == 0);
    return (row & 3) << 1;
  } else {
    // Rows shorter than 128 bytes share the banks with their neighbours.
    constexpr int kShift = kChunks == 2 ? 2 : kChunks == 4 ? 1 : 0;
    constexpr int kMask = kChunks == 2 ? 1 : kChunks == 4 ? 3 : 7;
    return (row >> kShift) & kMask;
  }
}

// The number of rows after which every key repeats.
constexpr int kSwizzlePeriod = 8;

// Returns the byte offset of (row, chunk) inside a stage of one operand.
template <SmemSwizzle kSwizzle, int kChunks>
__device__ __forceinline__ uint32_t swizzled_offset(int row, int chunk) {
  return static_cast<uint32_t>(row * kChunks + (chunk ^ swizzle_key<kSwizzle, kChunks>(row))) * 16;
}

}  // namespace jax_tcgemm
