// A piece of a dot product by float32 FMA.

#pragma once

#include <stdint.h>

namespace jax_tcgemm::simt {

// acc + sum of the first kCount products for which `inside(i)`; all loads are in flight together.
// Several short sums are sooner done than one, and nearer the exact one.
template <int kCount, typename Element, typename Inside>
__device__ __forceinline__ float add_products(float acc, const Element* a, const Element* b,
                                              int64_t step_a, int64_t step_b, Inside inside) {
  float x[kCount], y[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    x[i] = inside(i) ? float(a[i * step_a]) : 0.f;
    y[i] = inside(i) ? float(b[i * step_b]) : 0.f;
  }
  float sum[4] = {};
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum[i % 4] = fmaf(x[i], y[i], sum[i % 4]);
  return acc + ((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

}  // namespace jax_tcgemm::simt
