// Dot products by float32 FMA.

#pragma once

#include <stdint.h>

#include "gemm_params.h"
#include "scheduler/raster.cuh"

namespace jax_tcgemm::simt {

// Returns acc + the sum of the first kCount products for which `inside(i)` holds. All loads are in
// flight together. Several short sums finish earlier than one long sum, and are more exact.
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

// One row of A or one column of B: elements along k.
template <typename Element>
struct Line {
  const Element* data;
  int64_t stride;

  __device__ __forceinline__ Line(const Element* first, int64_t step) : data(first), stride(step) {}
  __device__ __forceinline__ Line(const GemmParams& params, const Operand& operand, bool k_major,
                                  int batch, int mn)
      : data(static_cast<const Element*>(operand.data) +
             batch_offset(params, batch, operand.batch) + mn * (k_major ? operand.ld : 1)),
        stride(k_major ? 1 : operand.ld) {}
};

// Returns the dot product, kStep products at a time.
template <int kStep, typename Element>
__device__ __forceinline__ float dot(Line<Element> a, Line<Element> b, int k) {
  float acc = 0.f;
#pragma unroll 1
  for (; k > 0; k -= kStep) {
    acc =
        add_products<kStep>(acc, a.data, b.data, a.stride, b.stride, [&](int i) { return i < k; });
    a.data += kStep * a.stride;
    b.data += kStep * b.stride;
  }
  return acc;
}

}  // namespace jax_tcgemm::simt
