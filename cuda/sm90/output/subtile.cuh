// Moves a sub-tile of D between a warp's registers (16 rows of accumulators, in wgmma's layout) and
// a buffer in shared memory, swizzled for TMA. Registers hold 16 columns at a time.

#pragma once

#include <stdint.h>

#include "common/dtype.cuh"
#include "epilogue/accumulator_chunk.cuh"
#include "kernel_config.h"
#include "ptx/cluster.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/stmatrix.cuh"
#include "sm90/output/output_tile.h"

namespace jax_tcgemm::sm90 {

// kWide: the buffer holds float32, else Element. kSwapAb: rows of the accumulators are columns of
// D. kWhole: rows of 128 bytes if they fit.
template <KernelConfig kConfig, typename Element, bool kWide, bool kSwapAb, bool kWhole>
struct OutputSubtile {
  static_assert(kWide || !kSwapAb);
  static constexpr int kElementBytes = kWide ? 4 : 2;
  static constexpr OutputBox kBox = output_box(kConfig, kElementBytes, kSwapAb, kWhole);
  static constexpr int kRowBytes = kBox.row_bytes;
  static constexpr int kBytes = kBox.rows * kRowBytes;
  // Columns of accumulators.
  static constexpr int kColumns = kSwapAb ? kBox.rows : kRowBytes / kElementBytes;
  static constexpr int kRoom = kConfig.staging_bytes() / 4 / kBytes;
  static constexpr int kBuffers = kRoom < 4 ? kRoom : 4;
  static constexpr int kChunks = kColumns / kChunkColumns;
  static constexpr int chunks() { return kChunks; }
  static constexpr bool wide() { return kWide; }
  static_assert(kConfig.output_n() % kColumns == 0 && kBuffers >= 2);

  static __device__ __forceinline__ void store(const Chunk& value, uint32_t buffer, int chunk) {
    const uint32_t address = chunk_address(buffer, chunk);
    if constexpr (kWide) {
#pragma unroll
      for (int i = 0; i < kChunkValues; i += 2) {
        if constexpr (kSwapAb) {
          ptx::store_shared_4(pair_address(address, i), value[i]);
          ptx::store_shared_4(pair_address(address, i) + kRowBytes, value[i + 1]);
        } else {
          ptx::store_shared_8(pair_address(address, i), value[i], value[i + 1]);
        }
      }
    } else {
      const uint32_t matrices[4] = {
          pack<Element>(value[0], value[1]), pack<Element>(value[2], value[3]),
          pack<Element>(value[4], value[5]), pack<Element>(value[6], value[7])};
      ptx::stmatrix_x4(address, matrices);
    }
  }

  static __device__ __forceinline__ void load(Chunk& value, uint32_t buffer, int chunk) {
    const uint32_t address = chunk_address(buffer, chunk);
    if constexpr (kWide) {
#pragma unroll
      for (int i = 0; i < kChunkValues; i += 2) {
        if constexpr (kSwapAb) {
          value[i] = __uint_as_float(ptx::load_shared_4(pair_address(address, i)));
          value[i + 1] = __uint_as_float(ptx::load_shared_4(pair_address(address, i) + kRowBytes));
        } else {
          ptx::load_shared_8(value[i], value[i + 1], pair_address(address, i));
        }
      }
    } else {
      uint32_t matrices[4];
      ptx::ldmatrix_x4(matrices, address);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack<Element>(matrices[i]);
        value[2 * i] = pair.x;
        value[2 * i + 1] = pair.y;
      }
    }
  }

  // Returns the byte offset of 16 bytes of a row in the buffer, with TMA's swizzle. Buffers are
  // aligned to the swizzle's period, so that XOR changes the chunk of an address.
  static __device__ __forceinline__ uint32_t chunk_offset(uint32_t row, uint32_t chunk) {
    const uint32_t key = kRowBytes == 128 ? row % 8 : row / 2 % 4;
    return row * kRowBytes + (chunk ^ key) * 16;
  }

 private:
  // Returns the address of the first values that this lane reads or writes of a chunk. 16-bit: the
  // row that the lane gives to ldmatrix and stmatrix. Their matrices come in the order (rows 0, 8;
  // columns 0), (rows 0, 8; columns 8).
  static __device__ __forceinline__ uint32_t chunk_address(uint32_t buffer, int chunk) {
    const uint32_t lane = ptx::volatile_lane();
    if constexpr (!kWide) return (buffer + chunk_offset(lane % 16, lane / 16)) ^ (chunk * 32);
    const uint32_t row = lane / 4;
    const uint32_t column = lane % 4 * 2;
    if constexpr (kSwapAb) {
      return buffer + chunk_offset(column, row / 4) + row % 4 * 4 + chunk * 16 * kRowBytes;
    }
    return (buffer + chunk_offset(row, column / 4) + column % 4 * 4) ^ (chunk * 64);
  }

  // Address of values i and i + 1: 8 rows further for every other pair, 8 columns further for the
  // last two pairs.
  static __device__ __forceinline__ uint32_t pair_address(uint32_t address, int i) {
    if constexpr (kSwapAb) return (address ^ (i / 2 % 2 * 32)) + i / 4 * 8 * kRowBytes;
    return (address ^ (i / 4 * 32)) + i / 2 % 2 * 8 * kRowBytes;
  }
};

// A sub-tile whose type is known at run time, so that a kernel has the code of an epilogue only
// once.
template <KernelConfig kConfig, typename Element, bool kSwapAb, bool kWhole>
struct FusedSubtile {
  static constexpr bool kAlwaysWide = sizeof(Element) == 4;
  using Wide = OutputSubtile<kConfig, Element, true, kSwapAb, kWhole>;
  using Narrow = OutputSubtile<kConfig, Element, kAlwaysWide, kSwapAb, kWhole>;
  static constexpr int kRowBytes = Wide::kRowBytes;
  static constexpr int kBytes = Wide::kBytes;
  static constexpr int kBuffers = Wide::kBuffers;
  static_assert(Narrow::kBytes == kBytes && Narrow::kBuffers == kBuffers);

  ElementType type;

  __device__ __forceinline__ bool wide() const { return kAlwaysWide || type == ElementType::kF32; }
  __device__ __forceinline__ int chunks() const { return wide() ? Wide::kChunks : Narrow::kChunks; }

  __device__ __forceinline__ void store(const Chunk& value, uint32_t buffer, int chunk) const {
    wide() ? Wide::store(value, buffer, chunk) : Narrow::store(value, buffer, chunk);
  }
  static __device__ __forceinline__ uint32_t chunk_offset(uint32_t row, uint32_t chunk) {
    return Wide::chunk_offset(row, chunk);
  }
  __device__ __forceinline__ void load(Chunk& value, uint32_t buffer, int chunk) const {
    wide() ? Wide::load(value, buffer, chunk) : Narrow::load(value, buffer, chunk);
  }

  // Writes the buffer to the (m, n) matrix at row y and column x. All lanes call this.
  __device__ __forceinline__ void copy_out(uint32_t buffer, void* matrix, int m, int n, int y,
                                           int x) const {
    wide() ? copy_words<float>(buffer, matrix, m, n, y, x)
           : copy_words<uint16_t>(buffer, matrix, m, n, y, x);
  }

 private:
  // Copies words that are aligned in the matrix. A row may begin between two words and end before
  // the buffer's row does. Several rows are copied at a time, because their loads take as long as
  // that of one row. (Shuffles would make the kernels with the most accumulators spill.)
  template <typename Value>
  static __device__ __forceinline__ void copy_words(uint32_t buffer, void* matrix, int m, int n,
                                                    int y, int x) {
    constexpr int kWords = kRowBytes / 4;
    constexpr int kWordValues = 4 / sizeof(Value);
    constexpr int kStep = 32 / kWords;
    constexpr int kAtOnce = 4;
    const int word = ptx::volatile_lane() % kWords;
    const int values = min(n - x, kWords * kWordValues) - word * kWordValues;  // from here on
    int row = ptx::volatile_lane() / kWords;
    Value* to = static_cast<Value*>(matrix) + (int64_t{y + row} * n + x + word * kWordValues);
#pragma unroll 1
    while (row < Wide::kBox.rows) {
      uint32_t low[kAtOnce];
      uint32_t high[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        low[i] = load_word(buffer, row + i * kStep, word);
        if (kWordValues == 2) high[i] = load_word(buffer, row + i * kStep, (word + 1) % kWords);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i, row += kStep, to += int64_t{kStep} * n) {
        const int left = y + row < m ? values : 0;
        if constexpr (kWordValues == 1) {
          if (left > 0) *to = __uint_as_float(low[i]);
        } else {
          // The row begins between two words: write the first value alone, then words from two
          // neighbours.
          const int shift = reinterpret_cast<uint64_t>(to) / 2 % 2;
          const uint32_t value = __funnelshift_r(low[i], high[i], 16 * shift);
          if (left > 0 && shift > 0 && word == 0) *to = low[i];
          if (left - shift > 1) *reinterpret_cast<uint32_t*>(to + shift) = value;
          if (left - shift == 1) to[shift] = value;
        }
      }
    }
  }

  static __device__ __forceinline__ uint32_t load_word(uint32_t buffer, int row, int word) {
    return ptx::load_shared_4(buffer + Wide::chunk_offset(row, word / 4) + word % 4 * 4);
  }
};

}  // namespace jax_tcgemm::sm90
