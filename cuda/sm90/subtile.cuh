// A sub-tile of D between the registers of a warp (16 rows of accumulators, dealt as wgmma does)
// and a buffer in shared memory, swizzled as TMA wants it.

#pragma once

#include <stdint.h>

#include "common/dtype.cuh"
#include "kernel_config.h"
#include "ptx/cluster.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/stmatrix.cuh"
#include "sm90/output_tile.h"

namespace jax_tcgemm::sm90 {

// kWide: float32 in the buffer, else Element. kExchanged: rows of the accumulators are columns of
// D. kPlain: there is no epilogue.
template <KernelConfig kConfig, typename Element, bool kWide, bool kExchanged, bool kPlain>
struct OutputSubtile {
  static_assert(kWide || !kExchanged);
  static constexpr int kElementBytes = kWide ? 4 : 2;
  static constexpr OutputBox kBox = output_box(kConfig, kElementBytes, kExchanged, kPlain);
  static constexpr int kRowBytes = kBox.row_bytes;
  static constexpr int kBytes = kBox.rows * kRowBytes;
  // Columns of accumulators.
  static constexpr int kColumns = kExchanged ? kBox.rows : kRowBytes / kElementBytes;
  static constexpr int kPerBlock = kConfig.tile_n / kColumns;
  static constexpr int kValues = kColumns / 2;  // of a thread
  static constexpr int kBuffers = kConfig.staging_bytes() / 4 / kBytes;
  static_assert(kConfig.tile_n % kColumns == 0 && kBuffers >= 2 && kBuffers <= 4);

  // A thread's bias: of its rows, if they are columns of D, or of its columns.
  static constexpr int kBiasValues = kExchanged ? 2 : kValues / 2;
  static constexpr int bias_index(int value) {
    return kExchanged ? value / 2 % 2 : value / 4 * 2 + value % 2;
  }

  static __device__ __forceinline__ void store(const float (&value)[kValues], uint32_t buffer) {
    const uint32_t address = buffer + lane_offset();
    if constexpr (kWide) {
#pragma unroll
      for (int i = 0; i < kValues; i += 2) {
        if constexpr (kExchanged) {
          ptx::store_shared_4(pair_address(address, i), value[i]);
          ptx::store_shared_4(pair_address(address, i) + kRowBytes, value[i + 1]);
        } else {
          ptx::store_shared_8(pair_address(address, i), value[i], value[i + 1]);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kValues; i += 8) {
        const uint32_t matrices[4] = {
            pack<Element>(value[i], value[i + 1]), pack<Element>(value[i + 2], value[i + 3]),
            pack<Element>(value[i + 4], value[i + 5]), pack<Element>(value[i + 6], value[i + 7])};
        ptx::stmatrix_x4<false>(address ^ (i / 8 * 32), matrices);
      }
    }
  }

  // value += beta * what the buffer holds.
  static __device__ __forceinline__ void add(float (&value)[kValues], uint32_t buffer, float beta) {
    const uint32_t address = buffer + lane_offset();
    if constexpr (kWide) {
#pragma unroll
      for (int i = 0; i < kValues; i += 2) {
        float c[2];
        if constexpr (kExchanged) {
          c[0] = __uint_as_float(ptx::load_shared_4(pair_address(address, i)));
          c[1] = __uint_as_float(ptx::load_shared_4(pair_address(address, i) + kRowBytes));
        } else {
          ptx::load_shared_8(c[0], c[1], pair_address(address, i));
        }
        value[i] = fmaf(beta, c[0], value[i]);
        value[i + 1] = fmaf(beta, c[1], value[i + 1]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kValues; i += 8) {
        uint32_t matrices[4];
        ptx::ldmatrix_x4(matrices, address ^ (i / 8 * 32));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 c = unpack<Element>(matrices[j]);
          value[i + 2 * j] = fmaf(beta, c.x, value[i + 2 * j]);
          value[i + 2 * j + 1] = fmaf(beta, c.y, value[i + 2 * j + 1]);
        }
      }
    }
  }

 private:
  // Byte offset of a 16-byte chunk: TMA's swizzle. Buffers are aligned to its period, so that the
  // chunk of an address changes by XOR.
  static __device__ __forceinline__ uint32_t chunk_offset(uint32_t row, uint32_t chunk) {
    const uint32_t key = kRowBytes == 128 ? row % 8 : row / 2 % 4;
    return row * kRowBytes + (chunk ^ key) * 16;
  }

  // Of what this lane reads and writes first. 16-bit: the row it gives to ldmatrix and stmatrix, of
  // matrices in the order (rows 0, 8; columns 0), (rows 0, 8; columns 8).
  static __device__ __forceinline__ uint32_t lane_offset() {
    const uint32_t lane = ptx::volatile_lane();
    if constexpr (!kWide) return chunk_offset(lane % 16, lane / 16);
    const uint32_t row = lane / 4;
    const uint32_t column = lane % 4 * 2;
    if constexpr (kExchanged) return chunk_offset(column, row / 4) + row % 4 * 4;
    return chunk_offset(row, column / 4) + column % 4 * 4;
  }

  // Of values i and i + 1: 8 rows further for every other i, 8 columns for every fourth.
  static __device__ __forceinline__ uint32_t pair_address(uint32_t address, int i) {
    if constexpr (kExchanged) return (address ^ (i / 2 % 2 * 32)) + i / 4 * 8 * kRowBytes;
    return (address ^ (i / 4 * 32)) + i / 2 % 2 * 8 * kRowBytes;
  }
};

}  // namespace jax_tcgemm::sm90
