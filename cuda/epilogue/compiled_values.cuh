// Values of an epilogue that was compiled at run time: how element types are read and written, and
// the operations whose meaning in JAX is not that of an operator of C++.
//
// A value of a floating-point type narrower than float32 is held in float32 and rounded after each
// operation, as if it had been written to memory.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <stdint.h>

#include <type_traits>

#include "common/dtype.cuh"
#include "ptx/shared_memory.cuh"

namespace jax_tcgemm {

// --- Element types ---------------------------------------------------------------------------

template <typename T>
inline constexpr bool kIsNarrowFloat =
    std::is_same_v<T, __nv_bfloat16> || std::is_same_v<T, __half> ||
    std::is_same_v<T, __nv_fp8_e4m3> || std::is_same_v<T, __nv_fp8_e5m2>;

// What a value of an element type is held in.
template <typename T>
using ValueOf = std::conditional_t<kIsNarrowFloat<T>, float, T>;

template <typename T>
__device__ __forceinline__ ValueOf<T> value_of(T element) {
  return static_cast<ValueOf<T>>(element);
}

// Two elements nearest to float32 values, ties to even; beyond the largest infinity, or NaN where
// there is no infinity. The instructions for 8 bits end at the largest instead, and CUDA's
// functions that do not are made of many.
template <typename T>
__device__ __forceinline__ uint32_t packed_floats(float first, float second) {
  if constexpr (sizeof(T) == 2) {
    return pack<T>(first, second);
  } else if constexpr (std::is_same_v<T, __nv_fp8_e4m3>) {
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;\n" : "=h"(pair) : "f"(second), "f"(first));
    constexpr float kNearestToLargest = 464.f;
    return pair | (fabsf(first) > kNearestToLargest ? 0x7f : 0) |
           (fabsf(second) > kNearestToLargest ? 0x7f00 : 0);
  } else {
    static_assert(std::is_same_v<T, __nv_fp8_e5m2>);
    uint16_t pair;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;\n" : "=h"(pair) : "f"(second), "f"(first));
    constexpr float kBetweenLargestAndInfinity = 61440.f;
    // The largest is 0x7b, infinity 0x7c.
    return pair + (fabsf(first) >= kBetweenLargestAndInfinity ? 1 : 0) +
           (fabsf(second) >= kBetweenLargestAndInfinity ? 0x100 : 0);
  }
}

template <typename T>
__device__ __forceinline__ T element_of(float value) {
  if constexpr (kIsNarrowFloat<T>) {
    using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, uint8_t>;
    const auto bits = static_cast<Bits>(packed_floats<T>(value, 0.f));
    return *reinterpret_cast<const T*>(&bits);
  } else {
    return static_cast<T>(value);
  }
}
template <typename T, typename Value>
__device__ __forceinline__ T element_of(Value value) {
  return static_cast<T>(value);
}

template <typename T>
__device__ __forceinline__ float rounded(float value) {
  return static_cast<float>(element_of<T>(value));
}

// A float32 in an integer type: towards zero, to the nearest end of the range, 0 for NaN.
template <typename T>
__device__ __forceinline__ T integer_of(float value) {
  if constexpr (std::is_same_v<T, uint32_t>) {
    return __float2uint_rz(value);
  } else if constexpr (std::is_same_v<T, int32_t>) {
    return __float2int_rz(value);
  } else {
    constexpr bool kIsSigned = static_cast<T>(-1) < T{0};
    constexpr int kHigh = (1 << (8 * sizeof(T) - (kIsSigned ? 1 : 0))) - 1;
    constexpr int kLow = kIsSigned ? -kHigh - 1 : 0;
    return static_cast<T>(min(max(__float2int_rz(value), kLow), kHigh));
  }
}

// --- Values of a thread in 16 x 16 of D (kChunkValues, dealt as accumulators) ------------------

template <typename T>
struct ScalarValues {
  ValueOf<T> value;
  __device__ __forceinline__ ValueOf<T> operator[](int) const { return value; }
};

template <typename T>
struct RowValues {
  ValueOf<T> value[2];
  __device__ __forceinline__ ValueOf<T> operator[](int i) const { return value[i / 2 % 2]; }
};

template <typename T>
struct ColumnValues {
  ValueOf<T> value[4];
  __device__ __forceinline__ ValueOf<T> operator[](int i) const { return value[i / 4 * 2 + i % 2]; }
};

template <typename T>
struct MatrixValues {
  ValueOf<T> value[8];
  __device__ __forceinline__ ValueOf<T> operator[](int i) const { return value[i]; }
};

// --- Memory ----------------------------------------------------------------------------------

template <typename T>
struct alignas(2 * sizeof(T)) ElementPair {
  T first, second;
};

template <typename T>
__device__ __forceinline__ void load_shared_pair(ValueOf<T>& first, ValueOf<T>& second,
                                                 uint32_t address) {
  using Pair = ElementPair<T>;
  Pair pair;
  if constexpr (sizeof(T) == 1) {
    *reinterpret_cast<uint16_t*>(&pair) = ptx::load_shared_2(address);
  } else if constexpr (sizeof(T) == 2) {
    *reinterpret_cast<uint32_t*>(&pair) = ptx::load_shared_4(address);
  } else {
    float2& words = *reinterpret_cast<float2*>(&pair);
    ptx::load_shared_8(words.x, words.y, address);
  }
  first = value_of(pair.first);
  second = value_of(pair.second);
}

template <typename T>
__device__ __forceinline__ ElementPair<T> pair_of(ValueOf<T> first, ValueOf<T> second) {
  if constexpr (kIsNarrowFloat<T>) {
    using Bits = std::conditional_t<sizeof(T) == 1, uint16_t, uint32_t>;
    const auto bits = static_cast<Bits>(packed_floats<T>(first, second));
    return *reinterpret_cast<const ElementPair<T>*>(&bits);
  } else {
    return {element_of<T>(first), element_of<T>(second)};
  }
}

template <typename T>
__device__ __forceinline__ void store_shared_pair(uint32_t address, ValueOf<T> first,
                                                  ValueOf<T> second) {
  const ElementPair<T> pair = pair_of<T>(first, second);
  if constexpr (sizeof(T) == 1) {
    ptx::store_shared_2(address, *reinterpret_cast<const uint16_t*>(&pair));
  } else if constexpr (sizeof(T) == 2) {
    ptx::store_shared_4(address, *reinterpret_cast<const float*>(&pair));
  } else {
    const float2& words = *reinterpret_cast<const float2*>(&pair);
    ptx::store_shared_8(address, words.x, words.y);
  }
}

// Of what no kernel writes while this one runs.
template <typename T>
__device__ __forceinline__ T load_global(const T* from) {
  T value;
  if constexpr (sizeof(T) == 1) {
    *reinterpret_cast<uint8_t*>(&value) = __ldg(reinterpret_cast<const uint8_t*>(from));
  } else if constexpr (sizeof(T) == 2) {
    *reinterpret_cast<uint16_t*>(&value) = __ldg(reinterpret_cast<const uint16_t*>(from));
  } else {
    *reinterpret_cast<uint32_t*>(&value) = __ldg(reinterpret_cast<const uint32_t*>(from));
  }
  return value;
}

template <int kBytes>
__device__ __forceinline__ void copy_shared_to_global(void* to, uint32_t from) {
  if constexpr (kBytes == 16) {
    uint32_t word[4];
    ptx::load_shared_16(word, from);
    *static_cast<uint4*>(to) = {word[0], word[1], word[2], word[3]};
  } else if constexpr (kBytes == 4) {
    *static_cast<uint32_t*>(to) = ptx::load_shared_4(from);
  } else if constexpr (kBytes == 2) {
    *static_cast<uint16_t*>(to) = ptx::load_shared_2(from);
  } else {
    static_assert(kBytes == 1);
    const uint16_t pair = ptx::load_shared_2(from & ~1u);
    *static_cast<uint8_t*>(to) = static_cast<uint8_t>(from & 1 ? pair >> 8 : pair);
  }
}

// Calls visit<0>(), visit<1>(), ...
template <int kCount, int kFirst = 0, typename Visitor>
__device__ __forceinline__ void each(Visitor&& visit) {
  if constexpr (kFirst < kCount) {
    visit.template operator()<kFirst>();
    each<kCount, kFirst + 1>(visit);
  }
}

// --- Operations ------------------------------------------------------------------------------

// NaN where either is, as in jax.numpy; fmaxf would drop it.
__device__ __forceinline__ float maximum(float x, float y) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;\n" : "=f"(result) : "f"(x), "f"(y));
  return result;
}
__device__ __forceinline__ float minimum(float x, float y) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;\n" : "=f"(result) : "f"(x), "f"(y));
  return result;
}
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

// Joins the values of lanes whose numbers differ in these bits.
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

// 2^(x log2 e) of the power that `ex2` makes of the rounded product, with the rounding error put
// back. Infinity has no error to be put back, nor has what is nearly 0, for that of an infinite
// product is NaN.
template <typename Ex2>
__device__ __forceinline__ float exp_by(float x, float least, Ex2&& ex2) {
  constexpr float kLog2E = 1.4426950408889634f;
  constexpr float kLog2ELow = 1.925963033500975e-08f;
  const float high = x * kLog2E;
  const float low = fmaf(x, kLog2ELow, fmaf(x, kLog2E, -high));
  const float power = ex2(high);
  const bool is_finite = high < 128.f && high > least;
  return is_finite ? fmaf(power, low * 0.6931471805599453f, power) : power;
}

// exp(x) to 2 ulp.
__device__ __forceinline__ float fast_exp(float x) {
  return exp_by(x, -200.f, [](float high) {
    float power;
    asm("ex2.approx.f32 %0, %1;\n" : "=f"(power) : "f"(high));
    return power;
  });
}

// The same, but 0 instead of less than 2^-126, for sums with 1.
__device__ __forceinline__ float exp_beside_one(float x) {
  return exp_by(x, -128.f, [](float high) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(power) : "f"(high));
    return power;
  });
}

// 1 / x of what is 1 or more; 0 instead of less than 2^-126.
__device__ __forceinline__ float reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(result) : "f"(x));
  return result;
}

// 1 / (1 + exp(-x)), to a few ulp.
__device__ __forceinline__ float logistic(float x) { return reciprocal(1.f + exp_beside_one(-x)); }

// 1 + tanh(x) and 1 - tanh(x), without cancellation.
struct BesideTanh {
  float plus, minus;
};
__device__ __forceinline__ BesideTanh beside_tanh(float x) {
  const float power = exp_beside_one(2.f * x);
  const float minus = 2.f * reciprocal(1.f + power);
  return {x > 0.f ? 2.f - minus : power * minus, minus};
}

__device__ __forceinline__ float sign(float x) {
  return x > 0.f ? 1.f : x < 0.f ? -1.f : x;  // of NaN and zeros themselves
}
template <typename T>
__device__ __forceinline__ T sign(T x) {
  return x > T{0} ? T{1} : x < T{0} ? static_cast<T>(-1) : T{0};
}

// x to a power that is known: by squaring, of a negative one the reciprocal.
template <int kPower, typename T>
__device__ __forceinline__ T integer_power(T x) {
  if constexpr (kPower < 0) {
    return T{1} / integer_power<-kPower>(x);
  } else if constexpr (kPower == 0) {
    return T{1};
  } else if constexpr (kPower % 2 != 0) {
    return integer_power<kPower - 1>(x) * x;
  } else {
    const T root = integer_power<kPower / 2>(x);
    return root * root;
  }
}

// Of integers: what XLA makes of a division by zero and of the one quotient out of range.
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

// Shifts by the number of bits or more leave nothing, or the sign.
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
template <typename T>
__device__ __forceinline__ T shifted_right_arithmetic(T x, T by) {
  const auto count = static_cast<uint32_t>(by);
  if (count < 8 * sizeof(T)) return static_cast<T>(x >> count);
  return static_cast<T>(x < T{0} ? -1 : 0);
}

template <typename T>
__device__ __forceinline__ int bits_set(T x) {
  return __popc(static_cast<uint32_t>(x) & (0xffffffffu >> (32 - 8 * sizeof(T))));
}

// 20 rounds of Threefry-2x32 (Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3"),
// in place.
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

// As jax.random.bits makes number `count` of an array, below 2^32, where threefry is partitionable.
__device__ __forceinline__ uint32_t random_bits(uint32_t key0, uint32_t key1, uint32_t count) {
  uint32_t x0 = 0;
  uint32_t x1 = count;
  threefry2x32(key0, key1, x0, x1);
  return x0 ^ x1;
}

// The same bits as another type of as many.
template <typename To, typename From>
__device__ __forceinline__ To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  return *reinterpret_cast<const To*>(&from);
}

}  // namespace jax_tcgemm
