// mma.sync of 8-bit operands in registers: 32 elements of k and 16 x 8 of D, by one warp.
//
// k may have any order, if it is the same in both operands. Let g = lane / 4 and t = lane % 4. A
// thread has 8 of the 32 elements of k, those of its t: of A in rows g and g + 8, of B in column g.
// Floats are converted exactly to float16 and multiplied as such, because compute capability 9.0
// has no mma.sync of 8-bit floats. The sums are therefore float32 and need no promotion.
//   D: (row g, columns 2 t and 2 t + 1), then (row g + 8, the same).

#pragma once

#include <stdint.h>

#include "arithmetic.h"

namespace jax_tcgemm::ptx {

// Converts four bytes to float16.
template <ElementType kType>
__device__ __forceinline__ void to_float16(uint32_t& low, uint32_t& high, uint32_t bytes) {
  const auto first = static_cast<uint16_t>(bytes);
  const auto second = static_cast<uint16_t>(bytes >> 16);
  if constexpr (kType == ElementType::kE4m3) {
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;\n" : "=r"(low) : "h"(first));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;\n" : "=r"(high) : "h"(second));
  } else {
    static_assert(kType == ElementType::kE5m2);
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;\n" : "=r"(low) : "h"(first));
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;\n" : "=r"(high) : "h"(second));
  }
}

template <Algorithm kAlgorithm,
          bool kIntegers = arithmetic_of(kAlgorithm).accumulator == ElementType::kS32>
struct MmaOf8Bits {
  static constexpr Arithmetic kArithmetic = arithmetic_of(kAlgorithm);
  using Sum = float;
  // Each half holds 16 of the 32 elements of k.
  struct A {
    uint32_t half[2][4];
  };
  struct B {
    uint32_t half[2][2];
    __device__ __forceinline__ B(uint32_t first, uint32_t second) {
      to_float16<kArithmetic.b>(half[0][0], half[0][1], first);
      to_float16<kArithmetic.b>(half[1][0], half[1][1], second);
    }
  };

  static __device__ __forceinline__ uint32_t bits(float value) { return __float_as_uint(value); }
  static __device__ __forceinline__ float value(uint32_t bits) { return __uint_as_float(bits); }

  // Takes rows g and g + 8.
  static __device__ __forceinline__ void take(A& a, const uint32_t (&row)[2][2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      to_float16<kArithmetic.a>(a.half[i][0], a.half[i][2], row[0][i]);
      to_float16<kArithmetic.a>(a.half[i][1], a.half[i][3], row[1][i]);
    }
  }

  static __device__ __forceinline__ void run(float (&d)[4], const A& a, const B& b) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
          " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a.half[i][0]), "r"(a.half[i][1]), "r"(a.half[i][2]), "r"(a.half[i][3]),
            "r"(b.half[i][0]), "r"(b.half[i][1]));
    }
  }
};

template <Algorithm kAlgorithm>
struct MmaOf8Bits<kAlgorithm, true> {
  using Sum = int32_t;
  struct A {
    uint32_t word[4];
  };
  struct B {
    uint32_t word[2];
    __device__ __forceinline__ B(uint32_t first, uint32_t second) : word{first, second} {}
  };

  static __device__ __forceinline__ uint32_t bits(int32_t value) { return value; }
  static __device__ __forceinline__ int32_t value(uint32_t bits) { return bits; }

  static __device__ __forceinline__ void take(A& a, const uint32_t (&row)[2][2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a.word[i] = row[i % 2][i / 2];
  }

  static __device__ __forceinline__ void run(int32_t (&d)[4], const A& a, const B& b) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32"
        " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a.word[0]), "r"(a.word[1]), "r"(a.word[2]), "r"(a.word[3]), "r"(b.word[0]),
          "r"(b.word[1]));
  }
};

}  // namespace jax_tcgemm::ptx
