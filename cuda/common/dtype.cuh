// Types of an algorithm, and rounding between float32 and the 16-bit types, two at a time.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "kernel_config.h"

namespace jax_tcgemm {

template <Algorithm kAlgorithm>
struct AlgorithmTraits {
  using Element = __half;
};

template <>
struct AlgorithmTraits<Algorithm::kBf16Bf16F32> {
  using Element = __nv_bfloat16;
};

template <>
struct AlgorithmTraits<Algorithm::kTf32Tf32F32> {
  using Element = float;
};

// Rounds two float32 values to nearest even and packs them, `low` in the low half.
template <typename Element>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  static_assert(sizeof(Element) == 2);
  if constexpr (__is_same(Element, __nv_bfloat16)) {
    const __nv_bfloat162 packed = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&packed);
  } else {
    const __half2 packed = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&packed);
  }
}

template <typename Element>
__device__ __forceinline__ float2 unpack(uint32_t packed) {
  if constexpr (__is_same(Element, __nv_bfloat16)) {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&packed));
  } else {
    return __half22float2(*reinterpret_cast<const __half2*>(&packed));
  }
}

}  // namespace jax_tcgemm
