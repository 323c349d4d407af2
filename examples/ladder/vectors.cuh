// Accesses of several elements at once.

#pragma once

#include <cuda_bf16.h>

namespace ladder {

// 16 bytes of consecutive elements.
template <typename T>
struct Vector {
  uint4 bits;
  __device__ void load(const T* from) { bits = *reinterpret_cast<const uint4*>(from); }
  __device__ float operator[](int i) const { return float(reinterpret_cast<const T*>(&bits)[i]); }
};

__device__ __forceinline__ void read_4(float* to, const float* shared) {
  const float4 value = *reinterpret_cast<const float4*>(shared);
  to[0] = value.x;
  to[1] = value.y;
  to[2] = value.z;
  to[3] = value.w;
}

__device__ __forceinline__ void write_4(float* to, const float* from) {
  *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
}

__device__ __forceinline__ void write_4(__nv_bfloat16* to, const float* from) {
  __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(from[0], from[1]),
                             __floats2bfloat162_rn(from[2], from[3])};
  *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(pairs);
}

__device__ __forceinline__ void write_2(float* to, float x, float y) {
  *reinterpret_cast<float2*>(to) = make_float2(x, y);
}

__device__ __forceinline__ void write_2(__nv_bfloat16* to, float x, float y) {
  *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(x, y);
}

}  // namespace ladder
