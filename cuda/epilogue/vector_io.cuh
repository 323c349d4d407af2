// Four neighbouring columns of C, bias, D and the pre-activation in global memory: one access where
// strides and alignment allow, element by element where not.

#pragma once

#include <stdint.h>

#include "common/dtype.cuh"
#include "gemm_params.h"

namespace jax_tcgemm {

using Vector = float[kVectorColumns];

// Reads `columns` (<= 0: none) columns as float32; the others are 0.
template <typename Element>
__device__ __forceinline__ void load_vector(Vector& out, const Addend& source, int64_t offset,
                                            int columns) {
  const bool whole = source.vectorizable && columns >= kVectorColumns;
  if (sizeof(Element) == 4 || source.is_float32) {
    const float* in = static_cast<const float*>(source.data) + offset;
    if (whole) {
      const float4 value = *reinterpret_cast<const float4*>(in);
      out[0] = value.x, out[1] = value.y, out[2] = value.z, out[3] = value.w;
    } else {
#pragma unroll
      for (int j = 0; j < kVectorColumns; ++j) out[j] = j < columns ? in[j * source.stride_n] : 0.f;
    }
  } else if constexpr (sizeof(Element) == 2) {
    const Element* in = static_cast<const Element*>(source.data) + offset;
    if (whole) {
      const uint2 packed = *reinterpret_cast<const uint2*>(in);
      const float2 low = unpack<Element>(packed.x);
      const float2 high = unpack<Element>(packed.y);
      out[0] = low.x, out[1] = low.y, out[2] = high.x, out[3] = high.y;
    } else {
#pragma unroll
      for (int j = 0; j < kVectorColumns; ++j) {
        out[j] = j < columns ? float(in[j * source.stride_n]) : 0.f;
      }
    }
  }
}

template <typename Out>
__device__ __forceinline__ void store_elements(Out* out, const Vector& value, int columns) {
#pragma unroll
  for (int j = 0; j < kVectorColumns; ++j) {
    if (j < columns) out[j] = Out(value[j]);
  }
}

// Rounds to the type of D and writes `columns` (<= 0: none) columns.
template <typename Element>
__device__ __forceinline__ void store_vector(void* matrix, bool is_float32, bool vectorizable,
                                             int64_t offset, const Vector& value, int columns) {
  const bool whole = vectorizable && columns >= kVectorColumns;
  if (sizeof(Element) == 4 || is_float32) {
    float* out = static_cast<float*>(matrix) + offset;
    if (!whole) return store_elements(out, value, columns);
    *reinterpret_cast<float4*>(out) = {value[0], value[1], value[2], value[3]};
  } else if constexpr (sizeof(Element) == 2) {
    Element* out = static_cast<Element*>(matrix) + offset;
    if (!whole) return store_elements(out, value, columns);
    *reinterpret_cast<uint2*>(out) = {pack<Element>(value[0], value[1]),
                                      pack<Element>(value[2], value[3])};
  }
}

}  // namespace jax_tcgemm
