// Values of an epilogue that was compiled at run time: how they are held, read and written for each
// element type.
//
// Floating-point values narrower than float32 are held in float32 and rounded after each operation,
// as if they had been written to memory.

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

// The type that holds a value of an element type.
template <typename T>
using ValueOf = std::conditional_t<kIsNarrowFloat<T>, float, T>;

template <typename T>
__device__ __forceinline__ ValueOf<T> value_of(T element) {
  return static_cast<ValueOf<T>>(element);
}

// Returns two elements nearest to float32 values, ties to even. Values beyond the largest number
// become infinity, or NaN if the type has no infinity. The 8-bit instructions saturate at the
// largest number instead, and CUDA's functions that do not saturate take many instructions.
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
    // The largest number is 0x7b, infinity is 0x7c.
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

// Converts float32 to an integer type: towards zero, saturated to the range, 0 for NaN.
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

// --- Values of a thread in 16 x 16 of D (kChunkValues, laid out like accumulators) -------------

template <typename T>
struct ScalarValues {
  ValueOf<T> value;
  __device__ __forceinline__ ValueOf<T> operator[](int) const { return value; }
};

template <typename T>
struct RowValues {
  ValueOf<T> value[2];
  __device__ __forceinline__ ValueOf<T> operator[](int i) const { return value[i / 2 % 2]; }
  __device__ __forceinline__ ValueOf<T>& operator[](int i) { return value[i / 2 % 2]; }
};

template <typename T>
struct ColumnValues {
  ValueOf<T> value[4];
  __device__ __forceinline__ ValueOf<T> operator[](int i) const { return value[i / 4 * 2 + i % 2]; }
  __device__ __forceinline__ ValueOf<T>& operator[](int i) { return value[i / 4 * 2 + i % 2]; }
};

template <typename T>
struct MatrixValues {
  ValueOf<T> value[8];
  __device__ __forceinline__ ValueOf<T> operator[](int i) const { return value[i]; }
  __device__ __forceinline__ ValueOf<T>& operator[](int i) { return value[i]; }
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

template <typename T>
__device__ __forceinline__ ValueOf<T> load_shared_value(uint32_t address) {
  T element;
  if constexpr (sizeof(T) == 1) {
    *reinterpret_cast<uint8_t*>(&element) = ptx::load_shared_1(address);
  } else if constexpr (sizeof(T) == 2) {
    *reinterpret_cast<uint16_t*>(&element) = ptx::load_shared_2(address);
  } else {
    *reinterpret_cast<uint32_t*>(&element) = ptx::load_shared_4(address);
  }
  return value_of(element);
}

template <typename T>
__device__ __forceinline__ void store_shared_value(uint32_t address, ValueOf<T> value) {
  const T element = element_of<T>(value);
  if constexpr (sizeof(T) == 1) {
    ptx::store_shared_1(address, *reinterpret_cast<const uint8_t*>(&element));
  } else if constexpr (sizeof(T) == 2) {
    ptx::store_shared_2(address, *reinterpret_cast<const uint16_t*>(&element));
  } else {
    ptx::store_shared_4(address, *reinterpret_cast<const float*>(&element));
  }
}

// Loads from memory that no kernel writes while this one runs.
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
    *static_cast<uint8_t*>(to) = ptx::load_shared_1(from);
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

}  // namespace jax_tcgemm
