// Types of elements in device code, and rounding between float32 and the 16-bit types, two at a
// time.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include <type_traits>

#include "arithmetic.h"

namespace jax_tcgemm {

// Types that only kernels compiled at run time multiply have no device type: no code reads it.
template <ElementType kType>
struct DeviceType {
  using Element = void;
};

template <typename Element>
inline constexpr ElementType kTypeOf = {};

#define JAX_TCGEMM_DEVICE_TYPE(Type, kBytes, Device, Ffi, Tma) \
  template <>                                                  \
  struct DeviceType<ElementType::Type> {                       \
    using Element = Device;                                    \
  };                                                           \
  template <>                                                  \
  inline constexpr ElementType kTypeOf<Device> = ElementType::Type;
JAX_TCGEMM_BUILT_TYPES(JAX_TCGEMM_DEVICE_TYPE)
#undef JAX_TCGEMM_DEVICE_TYPE

template <Algorithm kAlgorithm>
struct AlgorithmTraits {
  static constexpr Arithmetic kArithmetic = arithmetic_of(kAlgorithm);
  static_assert(kArithmetic.a == kArithmetic.b || kArithmetic.at_run_time);
  // The type of A and B.
  using Input = typename DeviceType<kArithmetic.a>::Element;
  // The type of D and of its addends; each of these may be float32 instead.
  using Output = typename DeviceType<kArithmetic.output>::Element;
};

// The type of accumulators in registers, except for those of float16.
template <Algorithm kAlgorithm>
using SumOf =
    std::conditional_t<arithmetic_of(kAlgorithm).accumulator == ElementType::kS32, int32_t, float>;

// Rounds two float32 values to nearest even and packs them, `low` in the low half.
template <typename Element>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  static_assert(sizeof(Element) == 2);
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    const __nv_bfloat162 packed = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&packed);
  } else {
    const __half2 packed = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&packed);
  }
}

template <typename Element>
__device__ __forceinline__ float2 unpack(uint32_t packed) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&packed));
  } else {
    return __half22float2(*reinterpret_cast<const __half2*>(&packed));
  }
}

}  // namespace jax_tcgemm
