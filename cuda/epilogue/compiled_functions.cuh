// Functions that a run-time compiled program calls: operations of JAX for which C++ has no
// operator, reductions, and random numbers. All work on values in the form of
// epilogue/compiled_values.cuh.

#pragma once

#include <stdint.h>

#include <type_traits>

#include "epilogue/fast_math.cuh"

namespace jax_tcgemm {

template <typename T>
__device__ __forceinline__ T maximum(T x, T y) {
  return x < y ? y : x;
}
template <typename T>
__device__ __forceinline__ T minimum(T x, T y) {
  return y < x ? y : x;
}

struct Sum {
  template <typename T>
  static __device__ __forceinline__ T join(T x, T y) {
    return x + y;
  }
};
struct Maximum {
  template <typename T>
  static __device__ __forceinline__ T join(T x, T y) {
    return maximum(x, y);
  }
};
struct Minimum {
  template <typename T>
  static __device__ __forceinline__ T join(T x, T y) {
    return minimum(x, y);
  }
};

// Joins the values of lanes whose numbers differ in the bits kFirst to kLast.
template <typename Join, int kFirst, int kLast, typename T>
__device__ __forceinline__ T joined_lanes(T x) {
#pragma unroll
  for (int bit = kFirst; bit <= kLast; bit *= 2) {
    x = Join::join(x, __shfl_xor_sync(0xffffffffu, x, bit));
  }
  return x;
}

template <typename T>
__device__ __forceinline__ T clamped(T low, T x, T high) {
  return minimum(maximum(low, x), high);
}

constexpr float kLog2E = 1.4426950408889634f;

// x log2 e, rounded, and by how much 2^(the rounding error) exceeds 1. The correction of an
// infinity is NaN.
struct Power {
  float high, correction;
};
__device__ __forceinline__ Power power_of_two(float x) {
  constexpr float kLog2ELow = 1.925963033500975e-08f;
  const float high = x * kLog2E;
  const float low = fmaf(x, kLog2ELow, fmaf(x, kLog2E, -high));
  return {high, low * 0.6931471805599453f};
}

// Returns exp(x) to 2 ulp.
__device__ __forceinline__ float fast_exp(float x) {
  const auto [high, correction] = power_of_two(x);
  float power;
  asm("ex2.approx.f32 %0, %1;\n" : "=f"(power) : "f"(high));
  const bool is_finite = high < 128.f && high > -200.f;
  return is_finite ? fmaf(power, correction, power) : power;
}

// Returns exp(x) for sums with 1: 0 below 2^-126, and at most 2^128 - 2^104, which serves as
// infinity there.
__device__ __forceinline__ float exp_beside_one(float x) {
  const auto [high, correction] = power_of_two(maximum(minimum(x, 88.72283f), -100.f));
  const float power = fast_exp2(high);
  return fmaf(power, correction, power);
}

// Returns 1 / (1 + exp(-x)) to a few ulp.
__device__ __forceinline__ float logistic(float x) {
  return fast_reciprocal(1.f + exp_beside_one(-x));
}

// 1 + tanh(x) and 1 - tanh(x), without cancellation.
struct BesideTanh {
  float plus, minus;
};
__device__ __forceinline__ BesideTanh beside_tanh(float x) {
  const float power = exp_beside_one(2.f * x);
  const float minus = 2.f * fast_reciprocal(1.f + power);
  return {x > 0.f ? 2.f - minus : power * minus, minus};
}

// The same functions for results of 16 bits or fewer. They round x log2 e, which changes the power
// by up to 2^-17, and overflow gives infinity.
__device__ __forceinline__ float coarse_exp(float x) {
  float power;
  asm("ex2.approx.f32 %0, %1;\n" : "=f"(power) : "f"(kLog2E * x));
  return power;
}
// Returns exp(factor x). The compiler folds a constant factor with log2 e.
__device__ __forceinline__ float coarse_exp_beside_one(float factor, float x) {
  return fast_exp2(kLog2E * factor * x);
}
__device__ __forceinline__ float coarse_logistic(float x, float factor = 1.f) {
  return fast_reciprocal(1.f + coarse_exp_beside_one(-factor, x));
}
__device__ __forceinline__ BesideTanh coarse_beside_tanh(float x) {
  const float power = coarse_exp_beside_one(2.f, x);
  const float minus = 2.f * fast_reciprocal(1.f + power);
  return {x > 0.f ? 2.f - minus : power * minus, minus};
}

__device__ __forceinline__ float sign(float x) {
  return x > 0.f ? 1.f : x < 0.f ? -1.f : x;  // NaN and zeros keep their value
}
template <typename T>
__device__ __forceinline__ T sign(T x) {
  return x > T{0} ? T{1} : x < T{0} ? static_cast<T>(-1) : T{0};
}

// Integer division with XLA's results for a division by zero and for the one quotient out of range.
template <typename T>
__device__ __forceinline__ T quotient(T x, T y) {
  if (y == T{0}) return static_cast<T>(-1);
  if (static_cast<T>(-1) < T{0} && y == static_cast<T>(-1)) return static_cast<T>(T{0} - x);
  return static_cast<T>(x / y);
}
template <typename T>
__device__ __forceinline__ T remainder_of(T x, T y) {
  if (y == T{0}) return x;
  if (static_cast<T>(-1) < T{0} && y == static_cast<T>(-1)) return T{0};
  return static_cast<T>(x % y);
}

// Shifts by the number of bits or more give zero, or the sign.
template <typename T>
__device__ __forceinline__ T shifted_left(T x, T by) {
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;
  const auto count = static_cast<uint32_t>(by);
  return count >= 8 * sizeof(T) ? T{0} : static_cast<T>(static_cast<Bits>(x) << count);
}
template <typename T>
__device__ __forceinline__ T shifted_right_logical(T x, T by) {
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t,
                                  std::conditional_t<sizeof(T) == 2, uint16_t, uint8_t>>;
  const auto count = static_cast<uint32_t>(by);
  return count >= 8 * sizeof(T) ? T{0} : static_cast<T>(static_cast<Bits>(x) >> count);
}
// The highest bit is the sign, even for unsigned integers.
template <typename T>
__device__ __forceinline__ T shifted_right_arithmetic(T x, T by) {
  using Signed = std::conditional_t<sizeof(T) == 4, int32_t,
                                    std::conditional_t<sizeof(T) == 2, int16_t, int8_t>>;
  const auto value = static_cast<Signed>(x);
  const auto count = static_cast<uint32_t>(by);
  if (count < 8 * sizeof(T)) return static_cast<T>(value >> count);
  return static_cast<T>(value < 0 ? -1 : 0);
}

template <typename T>
__device__ __forceinline__ int bits_set(T x) {
  return __popc(static_cast<uint32_t>(x) & (0xffffffffu >> (32 - 8 * sizeof(T))));
}

// Applies 20 rounds of Threefry-2x32 in place (Salmon et al., 2011, "Parallel random numbers: as
// easy as 1, 2, 3").
__device__ __forceinline__ void threefry2x32(uint32_t key0, uint32_t key1, uint32_t& x0,
                                             uint32_t& x1) {
  const uint32_t keys[3] = {key0, key1, key0 ^ key1 ^ 0x1BD11BDAu};
  constexpr int kRotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  x0 += keys[0];
  x1 += keys[1];
#pragma unroll
  for (int group = 0; group < 5; ++group) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int by = kRotations[group % 2][i];
      x0 += x1;
      x1 = __funnelshift_l(x1, x1, by) ^ x0;
    }
    x0 += keys[(group + 1) % 3];
    x1 += keys[(group + 2) % 3] + group + 1;
  }
}

// The two words that Threefry makes from two words by a key of two.
struct RandomWords {
  uint32_t first, second;
};
__device__ __forceinline__ RandomWords random_words(uint32_t key0, uint32_t key1, uint32_t x0,
                                                    uint32_t x1) {
  threefry2x32(key0, key1, x0, x1);
  return {x0, x1};
}

// Returns element `count` (below 2^32) of an array as jax.random.bits computes it with
// partitionable Threefry.
__device__ __forceinline__ uint32_t random_bits(uint32_t key0, uint32_t key1, uint32_t count) {
  const auto [first, second] = random_words(key0, key1, 0, count);
  return first ^ second;
}

// Returns the same bits as another type of the same size.
template <typename To, typename From>
__device__ __forceinline__ To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  return *reinterpret_cast<const To*>(&from);
}

}  // namespace jax_tcgemm
