// Packed values as fragments of 16-bit floats, exactly.

#pragma once

#include <stdint.h>

#include "packed_config.h"
#include "ptx/shared_memory.cuh"

namespace jax_tcgemm::sm90 {

// A thread's values of one (64, 64) tile: the fragments of four blocks of 16 k. A fragment has four
// registers of two neighbouring k: (row g, k 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8), where
// g = lane / 4, t = lane % 4. It is the A of mma.sync m16n8k16 and of wgmma.
template <PackedConfig kConfig>
class PackedTile {
 public:
  static constexpr bool kIsBf16 = kConfig.activation == ElementType::kBf16;
  static constexpr int kWords = kConfig.thread_bytes() / 4;

  // `address` is that of the thread's bytes in shared memory.
  __device__ __forceinline__ void load(uint32_t address) {
    ptx::load_shared_16(reinterpret_cast<uint32_t (&)[4]>(words_[0]), address);
    if constexpr (kWords == 8) {
      ptx::load_shared_16(reinterpret_cast<uint32_t (&)[4]>(words_[4]), address + 16);
    }
  }

  // The same from global memory, at a multiple of 16.
  __device__ __forceinline__ void load_global(const uint8_t* values) {
    const uint4* from = reinterpret_cast<const uint4*>(values);
#pragma unroll
    for (int i = 0; i < kWords / 4; ++i) {
      const uint4 word = __ldg(from + i);
      words_[4 * i] = word.x;
      words_[4 * i + 1] = word.y;
      words_[4 * i + 2] = word.z;
      words_[4 * i + 3] = word.w;
    }
  }

  // A value of 0 decodes to this before it is subtracted, twice; for weights without zero points.
  static constexpr uint32_t kZero = [] {
    switch (kConfig.format) {
      case PackedFormat::kInt4:
        return kIsBf16 ? 0x43084308u : 0x64086408u;  // 136, 1032
      case PackedFormat::kInt8:
        return kIsBf16 ? 0u : 0x64806480u;  // 1152
      default:
        return kIsBf16 ? 0x43004300u : 0x64006400u;  // 128, 1024
    }
  }();

  // Returns register r of block b. `zero` is kZero, or the zero point in the same form.
  __device__ __forceinline__ uint32_t value(int b, int r, uint32_t zero) const {
    if constexpr (kConfig.bits() == 4) {
      const uint32_t word = words_[b];
      return subtract(merge(r == 0 ? word : word >> (4 * r), 0x000f000fu, kMagic), zero);
    } else {
      const uint32_t word = words_[2 * b + r / 2];
      return kConfig.format == PackedFormat::kInt8 ? int8(word, r % 2) : e4m3(word, r % 2);
    }
  }

  static __device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t result;
    if constexpr (kIsBf16) {
      asm("mul.bf16x2 %0, %1, %2;\n" : "=r"(result) : "r"(a), "r"(b));
    } else {
      asm("mul.f16x2 %0, %1, %2;\n" : "=r"(result) : "r"(a), "r"(b));
    }
    return result;
  }

  // Returns a * b + c in bfloat16, rounded once.
  static __device__ __forceinline__ uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t result;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;\n" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    return result;
  }

 private:
  // 128 in bfloat16, 1024 in float16: the last bits of the mantissa count in ones.
  static constexpr uint32_t kMagic = kIsBf16 ? 0x43004300u : 0x64006400u;

  static __device__ __forceinline__ uint32_t subtract(uint32_t a, uint32_t b) {
    uint32_t result;
    if constexpr (kIsBf16) {
      asm("sub.bf16x2 %0, %1, %2;\n" : "=r"(result) : "r"(a), "r"(b));
    } else {
      asm("sub.f16x2 %0, %1, %2;\n" : "=r"(result) : "r"(a), "r"(b));
    }
    return result;
  }

  // (word & mask) | bits in one instruction, which the compiler does not always find.
  static __device__ __forceinline__ uint32_t merge(uint32_t word, uint32_t mask, uint32_t bits) {
    uint32_t result;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;\n" : "=r"(result) : "r"(word), "r"(mask), "r"(bits));
    return result;
  }

  // bfloat16: (128 + low 7 bits) - (128 or, if the sign is set, 256). float16: the sign bit is
  // flipped, which adds 128.
  static __device__ __forceinline__ uint32_t int8(uint32_t word, int odd) {
    const uint32_t moved = odd ? word >> 8 : word;
    if constexpr (kIsBf16) {
      return subtract(merge(moved, 0x007f007fu, kMagic), merge(moved, 0x00800080u, kMagic));
    }
    return subtract(merge(moved ^ 0x00800080u, 0x00ff00ffu, kMagic), kZero);
  }

  // Moves exponent and mantissa to those of the wider type, whose bias is larger by 120 (bfloat16)
  // or by 8 (float16). Subnormal numbers become exact, too. NaN becomes 480; see pack.
  static __device__ __forceinline__ uint32_t e4m3(uint32_t word, int odd) {
    constexpr int kShift = kIsBf16 ? 4 : 7;
    const uint32_t sign = (odd ? word : word << 8) & 0x80008000u;
    const uint32_t rest =
        (odd ? word >> (8 - kShift) : word << kShift) & (kIsBf16 ? 0x07f007f0u : 0x3f803f80u);
    return multiply(sign | rest, kIsBf16 ? 0x7b807b80u : 0x5c005c00u);
  }

  uint32_t words_[kWords];
};

// Scales and zero points of one stage and block of rows, in shared memory.
template <PackedConfig kConfig>
class PackedScales {
 public:
  static constexpr int kBytes = element_bytes(kConfig.scale);

  // `row` is that of the block; `count` is how many groups of the stage there are.
  __device__ __forceinline__ PackedScales(uint32_t address, int row, int count)
      : address_(address + row * kBytes), count_(count) {}

  __device__ __forceinline__ float scale(int group, int half) const {
    return number(at(group) + 8 * half * kBytes);
  }
  // A factor of pairs of values, as a sum of two numbers of the activations' type, each twice.
  struct Factor {
    uint32_t high;
    uint32_t low;  // unused if the scale has the type of the activations

    // Returns the products, as if rounded once; 0 if the mask is 0.
    __device__ __forceinline__ uint32_t times(uint32_t values, uint32_t mask) const {
      using Tile = PackedTile<kConfig>;
      if constexpr (kConfig.scale == kConfig.activation) {
        return Tile::multiply(values, high & mask);
      } else {
        return Tile::multiply_add(values, high & mask, Tile::multiply(values, low & mask));
      }
    }
  };
  __device__ __forceinline__ Factor factor(int group, int half) const {
    const float number = scale(group, half);
    if constexpr (kConfig.scale == kConfig.activation) {
      return {twice(number), 0u};
    } else {
      static_assert(PackedTile<kConfig>::kIsBf16, "a scale may not fit into float16");
      // The high part of infinity is the largest number: infinity would leave NaN for the low part.
      uint32_t high;
      asm("cvt.rn.satfinite.bf16x2.f32 %0, %1, %1;\n" : "=r"(high) : "f"(number));
      return {high, twice(number - __uint_as_float(high << 16))};
    }
  }
  // The zero point as PackedTile::value takes it.
  __device__ __forceinline__ uint32_t zero(int group, int half) const {
    if constexpr (!kConfig.has_zeros) return PackedTile<kConfig>::kZero;
    return as_zero(number(at(group) + kConfig.scale_row_bytes() + 8 * half * kBytes));
  }
  // The same from 128 plus the zero point.
  static __device__ __forceinline__ uint32_t as_zero(float biased) {
    return twice(biased + (PackedTile<kConfig>::kIsBf16 ? 0.f : 1024.f - 128.f));
  }

 private:
  // Behind the last group there is no number; what follows multiplies sums that are 0.
  __device__ __forceinline__ uint32_t at(int group) const {
    return address_ + (group < count_ ? group : 0) * kConfig.group_bytes();
  }

  static __device__ __forceinline__ float number(uint32_t address) {
    if constexpr (kConfig.scale == ElementType::kF32) {
      return __uint_as_float(ptx::load_shared_4(address));
    } else if constexpr (kConfig.scale == ElementType::kBf16) {
      return __uint_as_float(static_cast<uint32_t>(ptx::load_shared_2(address)) << 16);
    } else {
      float result;
      asm("cvt.f32.f16 %0, %1;\n" : "=f"(result) : "h"(ptx::load_shared_2(address)));
      return result;
    }
  }

  static __device__ __forceinline__ uint32_t twice(float number) {
    uint32_t result;
    if constexpr (PackedTile<kConfig>::kIsBf16) {
      asm("cvt.rn.bf16x2.f32 %0, %1, %1;\n" : "=r"(result) : "f"(number));
    } else {
      asm("cvt.rn.f16x2.f32 %0, %1, %1;\n" : "=r"(result) : "f"(number));
    }
    return result;
  }

  uint32_t address_;
  int count_;
};

}  // namespace jax_tcgemm::sm90
