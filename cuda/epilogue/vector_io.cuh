// Reads and writes neighbouring columns of C, bias, D and the pre-activation in global memory: four
// columns in one access if strides and alignment allow, otherwise element by element.

#pragma once

#include <stdint.h>

#include "common/dtype.cuh"
#include "gemm_params.h"

namespace jax_tcgemm {

template <int kWidth>
using Vector = float[kWidth];

// Reads element `at` of C, of a bias or of a scale.
template <typename Element>
__device__ __forceinline__ float load(const Addend& source, int64_t at) {
  return source.type == ElementType::kF32 ? static_cast<const float*>(source.data)[at]
                                          : float(static_cast<const Element*>(source.data)[at]);
}

// Reads kVectorColumns columns at once.
template <typename Element>
__device__ __forceinline__ void load_whole_vector(Vector<kVectorColumns>& out, const Addend& source,
                                                  int64_t offset) {
  if (sizeof(Element) == 4 || source.type == ElementType::kF32) {
    const float4 value =
        *reinterpret_cast<const float4*>(static_cast<const float*>(source.data) + offset);
    out[0] = value.x, out[1] = value.y, out[2] = value.z, out[3] = value.w;
  } else if constexpr (sizeof(Element) == 2) {
    const uint2 packed =
        *reinterpret_cast<const uint2*>(static_cast<const Element*>(source.data) + offset);
    const float2 low = unpack<Element>(packed.x);
    const float2 high = unpack<Element>(packed.y);
    out[0] = low.x, out[1] = low.y, out[2] = high.x, out[3] = high.y;
  }
}

// Reads `columns` (<= 0: none) columns as float32. The others are 0.
template <typename Element, int kWidth>
__device__ __forceinline__ void load_vector(Vector<kWidth>& out, const Addend& source,
                                            int64_t offset, int columns) {
  if constexpr (kWidth == kVectorColumns) {
    if (source.vectorizable && columns >= kWidth)
      return load_whole_vector<Element>(out, source, offset);
  }
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    const int64_t at = offset + j * source.stride_n;
    out[j] = j >= columns ? 0.f : load<Element>(source, at);
  }
}

template <typename Out, int kWidth>
__device__ __forceinline__ void store_elements(Out* out, const Vector<kWidth>& value, int columns) {
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    if (j < columns) out[j] = Out(value[j]);
  }
}

// Rounds to the type of D and writes `columns` (<= 0: none) columns.
template <typename Element, int kWidth>
__device__ __forceinline__ void store_vector(void* matrix, ElementType type, bool vectorizable,
                                             int64_t offset, const Vector<kWidth>& value,
                                             int columns) {
  const bool whole = kWidth == kVectorColumns && vectorizable && columns >= kWidth;
  if (sizeof(Element) == 4 || type == ElementType::kF32) {
    float* out = static_cast<float*>(matrix) + offset;
    if (!whole) return store_elements<float, kWidth>(out, value, columns);
    if constexpr (kWidth == 4) {
      *reinterpret_cast<float4*>(out) = {value[0], value[1], value[2], value[3]};
    }
  } else if constexpr (sizeof(Element) == 2) {
    Element* out = static_cast<Element*>(matrix) + offset;
    if (!whole) return store_elements<Element, kWidth>(out, value, columns);
    if constexpr (kWidth == 4) {
      *reinterpret_cast<uint2*>(out) = {pack<Element>(value[0], value[1]),
                                        pack<Element>(value[2], value[3])};
    }
  }
}

}  // namespace jax_tcgemm
