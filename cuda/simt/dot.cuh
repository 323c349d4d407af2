// A piece of a dot product by float32 FMA.

#pragma once

#include <stdint.h>

namespace jax_tcgemm::simt {

// acc + sum of the first kCount products for which `inside(i)`; all loads are in flight together.
template <int kCount, typename Element, typename Inside>
__device__ __forceinline__ float add_products(float acc, const Element* a, const Element* b,
                                              int64_t step_a, int64_t step_b, Inside inside) {
  float x[kCount], y[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    x[i] = inside(i) ? float(a[i * step_a]) : 0.f;
    y[i] = inside(i) ? float(b[i * step_b]) : 0.f;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) acc = fmaf(x[i], y[i], acc);
  return acc;
}

}  // namespace jax_tcgemm::simt
