// Dequantizes a packed weight: (u - zero) * scale in float32, rounded once. For products of so many
// rows that the multiplication takes most of the time.
//
// A block has a tile of 64 columns of W by 128 k. A thread decodes 16 or 32 bytes into shared
// memory, then the block writes rows of 256 bytes.

#pragma once

#include <stdint.h>

#include "packed_config.h"
#include "sm90/packed/decode.cuh"

namespace jax_tcgemm::sm90 {

template <PackedConfig kConfig>
struct Unpack {
  using Tile = PackedTile<kConfig>;
  static constexpr int kColumns = kUnpackTiles * kPackedTile;  // k
  static constexpr int kPitch = kColumns + 8;                  // avoids bank conflicts

  const UnpackParams& params;
  uint16_t (&rows)[kPackedTile][kPitch];  // (n, k)

  static __device__ __forceinline__ float number(const uint8_t* from, int index) {
    if constexpr (kConfig.scale == ElementType::kF32) {
      return __ldg(reinterpret_cast<const float*>(from) + index);
    } else {
      const uint16_t bits = __ldg(reinterpret_cast<const uint16_t*>(from) + index);
      if constexpr (kConfig.scale == ElementType::kBf16) {
        return __uint_as_float(static_cast<uint32_t>(bits) << 16);
      }
      float result;
      asm("cvt.f32.f16 %0, %1;\n" : "=f"(result) : "h"(bits));
      return result;
    }
  }

  // Returns the pair times a scale, rounded.
  static __device__ __forceinline__ uint32_t scaled(uint32_t pair, float scale) {
    float low;
    float high;
    uint32_t result;
    if constexpr (Tile::kIsBf16) {
      low = __uint_as_float(pair << 16);
      high = __uint_as_float(pair & 0xffff0000u);
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(result) : "f"(high * scale), "f"(low * scale));
    } else {
      asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}\n"
          : "=f"(low), "=f"(high)
          : "r"(pair));
      asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(result) : "f"(high * scale), "f"(low * scale));
    }
    return result;
  }

  // Decodes one tile.
  __device__ __forceinline__ void decode(int n_tile, int k_tile, int batch) const {
    const int thread = threadIdx.x % 128;
    const int column = threadIdx.x / 128 * kPackedTile;
    const int row = thread / 32 * 16 + thread % 32 / 4;
    Tile tile;
    tile.load_global(params.values + batch * params.values_batch +
                     (static_cast<int64_t>(n_tile) * params.k_tiles + k_tile) *
                         kConfig.tile_bytes() +
                     thread * kConfig.thread_bytes());
    const uint8_t* const scales =
        params.scales + batch * params.scales_batch +
        static_cast<int64_t>(n_tile) * params.groups * kConfig.group_bytes();
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      const int group = (k_tile * kPackedTile + 16 * block) / params.group;
      const uint8_t* const from = scales + static_cast<int64_t>(group) * kConfig.group_bytes();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float scale = number(from, row + 8 * half);
        const uint32_t zero = kConfig.has_zeros
                                  ? PackedScales<kConfig>::as_zero(
                                        number(from + kConfig.scale_row_bytes(), row + 8 * half))
                                  : Tile::kZero;
#pragma unroll
        for (int r = half; r < 4; r += 2) {
          const int k = column + 16 * block + thread % 4 * 2 + 8 * (r / 2);
          *reinterpret_cast<uint32_t*>(&rows[row + 8 * half][k]) =
              scaled(tile.value(block, r, zero), scale);
        }
      }
    }
  }

  __device__ __forceinline__ void run() const {
    const int n_tile = blockIdx.y;
    const int first = blockIdx.x * kUnpackTiles;
    const int k_tile = first + threadIdx.x / 128;
    if (k_tile < params.k_tiles) decode(n_tile, k_tile, blockIdx.z);
    __syncthreads();
    constexpr int kChunk = 8;  // elements
    constexpr int kChunks = kColumns / kChunk;
    const int64_t k = static_cast<int64_t>(params.k_tiles) * kPackedTile;
    for (int i = threadIdx.x; i < kPackedTile * kChunks; i += kUnpackThreads) {
      const int row = i / kChunks;
      const int chunk = i % kChunks;
      const int64_t n = static_cast<int64_t>(n_tile) * kPackedTile + row;
      const int64_t at = static_cast<int64_t>(first) * kPackedTile + chunk * kChunk;
      if (n >= params.n || at >= k) continue;
      uint16_t* const to =
          static_cast<uint16_t*>(params.w) + (blockIdx.z * int64_t{params.n} + n) * k + at;
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(&rows[row][chunk * kChunk]);
    }
  }
};

}  // namespace jax_tcgemm::sm90
