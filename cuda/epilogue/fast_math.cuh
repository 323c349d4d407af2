// Instructions for float32 that built epilogues and functions compiled at run time share.

#pragma once

namespace jax_tcgemm {

// Return the larger and the smaller of two values like jnp.maximum and jnp.minimum: NaN if either
// is NaN, and -0 is less than 0.
__device__ __forceinline__ float maximum(float x, float y) {
#if __CUDA_ARCH__ >= 800
  float result;
  asm("max.NaN.f32 %0, %1, %2;\n" : "=f"(result) : "f"(x), "f"(y));
  return result;
#else
  return x != x ? x : y != y ? y : fmaxf(x, y);
#endif
}
__device__ __forceinline__ float minimum(float x, float y) {
#if __CUDA_ARCH__ >= 800
  float result;
  asm("min.NaN.f32 %0, %1, %2;\n" : "=f"(result) : "f"(x), "f"(y));
  return result;
#else
  return x != x ? x : y != y ? y : fminf(x, y);
#endif
}

// Returns 2^x, or 0 if that is below 2^-126.
__device__ __forceinline__ float fast_exp2(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(power) : "f"(x));
  return power;
}

// Returns 1 / x, or 0 if that is below 2^-126.
__device__ __forceinline__ float fast_reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(result) : "f"(x));
  return result;
}

}  // namespace jax_tcgemm
