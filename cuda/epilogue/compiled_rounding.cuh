// Operations of a run-time compiled program whose result depends on the element type: they step
// along the type's numbers, or round to the type more than once. Values are held in float32
// (epilogue/compiled_values.cuh). Each operation matches XLA bit for bit.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <stdint.h>

#include <type_traits>

#include "epilogue/compiled_functions.cuh"
#include "epilogue/compiled_values.cuh"

namespace jax_tcgemm {

template <typename T>
inline constexpr int kMantissaBits = 0;
template <>
inline constexpr int kMantissaBits<float> = 23;
template <>
inline constexpr int kMantissaBits<__nv_bfloat16> = 7;
template <>
inline constexpr int kMantissaBits<__half> = 10;
template <>
inline constexpr int kMantissaBits<__nv_fp8_e4m3> = 3;
template <>
inline constexpr int kMantissaBits<__nv_fp8_e5m2> = 2;

template <typename T>
inline constexpr int kExponentBits = 8 * sizeof(T) - 1 - kMantissaBits<T>;

template <typename T>
using BitsOf = std::conditional_t<sizeof(T) == 4, uint32_t,
                                  std::conditional_t<sizeof(T) == 2, uint16_t, uint8_t>>;

// Converts a value that its type represents exactly to an element. bfloat16 keeps the bits of a
// NaN.
template <typename T>
__device__ __forceinline__ T exact_element(float value) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return bits_as<T>(static_cast<uint16_t>(__float_as_uint(value) >> 16));
  } else {
    return element_of<T>(value);
  }
}

// Returns the type's next number after x towards y.
template <typename T>
__device__ __forceinline__ float next_after(float x, float y) {
  if constexpr (std::is_same_v<T, float>) {
    return nextafterf(x, y);
  } else {
    using Bits = BitsOf<T>;
    if (x != x || y != y) return x + y;
    if (x == y) return y;
    const Bits bits = bits_as<Bits>(exact_element<T>(x));
    const bool grows = (x < y) == (x > 0.f);
    const auto next = static_cast<Bits>(grows ? bits + 1 : bits - 1);
    constexpr auto kSign = static_cast<Bits>(1 << (8 * sizeof(T) - 1));
    const auto least = static_cast<Bits>(y < 0.f ? kSign | 1 : 1);
    return value_of(bits_as<T>(x == 0.f ? least : next));
  }
}

// Returns x with fewer bits. The mantissa is rounded to nearest, ties to even. Numbers beyond the
// exponent's range become infinite, or zero if they would be subnormal. NaN stays NaN.
template <typename T, int kExponent, int kMantissa>
__device__ __forceinline__ float reduced_precision(float x) {
  using Bits = BitsOf<T>;
  constexpr int kWidth = kMantissaBits<T>;
  constexpr int kBias = (1 << (kExponentBits<T> - 1)) - 1;
  constexpr uint32_t kSign = 1u << (8 * sizeof(T) - 1);
  constexpr uint32_t kInfinity = kSign - (1u << kWidth);
  uint32_t bits = bits_as<Bits>(exact_element<T>(x));
  if constexpr (kMantissa < kWidth) {
    constexpr int kDropped = kWidth - kMantissa;
    bits += (bits >> kDropped & 1) + (1u << (kDropped - 1)) - 1;
    bits &= ~((1u << kDropped) - 1);
  }
  if constexpr (kExponent < kExponentBits<T>) {
    constexpr int kReduced = (1 << (kExponent - 1)) - 1;
    const uint32_t exponent = bits & kInfinity;
    const uint32_t sign = bits & kSign;
    if (exponent <= static_cast<uint32_t>(kBias - kReduced) << kWidth) bits = sign;
    if (exponent > static_cast<uint32_t>(kBias + kReduced) << kWidth) bits = sign | kInfinity;
  }
  return x == x ? value_of(bits_as<T>(static_cast<Bits>(bits))) : x;
}

// The type to which XLA rounds within one operation.
template <typename T>
using StepOf = std::conditional_t<sizeof(T) == 1, __half, T>;

// Returns so_far * x^kPower by squaring, rounded at each step.
template <typename Step, int kPower>
__device__ __forceinline__ float continued_power(float so_far, float x) {
  if constexpr (kPower == 0) {
    return so_far;
  } else {
    if constexpr (kPower % 2 != 0) so_far = rounded<Step>(so_far * x);
    return continued_power<Step, kPower / 2>(so_far, rounded<Step>(x * x));
  }
}

template <typename Step, int kPower>
__device__ __forceinline__ float power_by_steps(float x) {
  if constexpr (kPower < 0) {
    return rounded<Step>(1.f / power_by_steps<Step, -kPower>(x));
  } else if constexpr (kPower == 0) {
    return 1.f;
  } else if constexpr (kPower == 1) {
    return x;
  } else if constexpr (kPower % 2 == 0) {
    return power_by_steps<Step, kPower / 2>(rounded<Step>(x * x));
  } else {
    return continued_power<Step, kPower / 2>(x, rounded<Step>(x * x));
  }
}

// Returns x to a constant power. A negative power gives the reciprocal.
template <typename T, int kPower>
__device__ __forceinline__ float integer_power(float x) {
  return rounded<T>(power_by_steps<StepOf<T>, kPower>(x));
}

// (1 + x) (1 - x)
template <typename T>
__device__ __forceinline__ float one_minus_square(float x) {
  using Step = StepOf<T>;
  return rounded<T>(rounded<Step>(1.f + x) * rounded<Step>(1.f - x));
}

// Returns the number of type T nearest to an integer, rounded once.
template <typename T, typename Integer>
__device__ __forceinline__ float nearest_to(Integer x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16> && sizeof(Integer) == 4) {
    if constexpr (static_cast<Integer>(-1) < Integer{0}) {
      return value_of(__int2bfloat16_rn(x));
    } else {
      return value_of(__uint2bfloat16_rn(x));
    }
  } else {
    return rounded<T>(static_cast<float>(x));
  }
}

}  // namespace jax_tcgemm
