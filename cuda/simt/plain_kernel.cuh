// The simt kernel for D = A * B of one matrix and nothing else, the common tiny product: parameters
// in one line of the constant cache and a few hundred instructions, because at this size the time
// goes into fetching both. Roles and timeline as in simt/kernel.cuh.

#pragma once

#include <stdint.h>

#include "common/dtype.cuh"
#include "gemm_params.h"
#include "kernel_config.h"
#include "simt/dot.cuh"

namespace jax_tcgemm::simt {

struct PlainParams {
  const void* a;
  const void* b;
  void* d;
  int64_t ld_a, ld_b;
  int32_t m, n, k;
  bool d_is_float32;
};

template <KernelConfig kConfig, Major kMajorA, Major kMajorB>
__device__ __forceinline__ void run_plain(const PlainParams& p) {
  using Element = typename AlgorithmTraits<kConfig.algorithm>::Element;
  const int row = blockIdx.y * kConfig.tile_m + threadIdx.x / kConfig.tile_n;
  const int column = blockIdx.x * kConfig.tile_n + threadIdx.x % kConfig.tile_n;
  if (row >= p.m || column >= p.n) return;
  constexpr bool kKMajorA = kMajorA == Major::kK;
  constexpr bool kKMajorB = kMajorB == Major::kK;
  const Element* a = static_cast<const Element*>(p.a) + (kKMajorA ? row * p.ld_a : row);
  const Element* b = static_cast<const Element*>(p.b) + (kKMajorB ? column * p.ld_b : column);
  const int64_t step_a = kKMajorA ? 1 : p.ld_a;
  const int64_t step_b = kKMajorB ? 1 : p.ld_b;
  float acc = 0.f;
  int k = p.k;
#pragma unroll 1
  for (; k >= kConfig.tile_k; k -= kConfig.tile_k) {
    acc = add_products<kConfig.tile_k>(acc, a, b, step_a, step_b, [](int) { return true; });
    a += kConfig.tile_k * step_a;
    b += kConfig.tile_k * step_b;
  }
  if (k > 0) {
    acc = add_products<kConfig.tile_k>(acc, a, b, step_a, step_b, [&](int i) { return i < k; });
  }
  const int64_t element = int64_t{row} * p.n + column;
  if (sizeof(Element) == 4 || p.d_is_float32) {
    static_cast<float*>(p.d)[element] = acc;
  } else {
    static_cast<Element*>(p.d)[element] = Element(acc);
  }
}

template <typename Row, Major kMajorA, Major kMajorB>
__global__ void __launch_bounds__(Row::kConfig.threads())
    plain_kernel(const __grid_constant__ PlainParams params) {
  run_plain<Row::kConfig, kMajorA, kMajorB>(params);
}

}  // namespace jax_tcgemm::simt
