// The simt kernel for the common tiny product: D = A * B of one matrix and nothing else. Its
// parameters fit one line of the constant cache and its code has a few hundred instructions,
// because at this size the time goes into fetching both. Roles and timeline: as in simt/kernel.cuh.

#pragma once

#include <stdint.h>

#include "common/dtype.cuh"
#include "kernel_config.h"
#include "simt/dot.cuh"
#include "simt/plain_params.h"

namespace jax_tcgemm::simt {

template <KernelConfig kConfig, Major kMajorA, Major kMajorB>
__device__ __forceinline__ void run_plain(const PlainParams& p) {
  using Input = typename AlgorithmTraits<kConfig.algorithm>::Input;
  using Output = typename AlgorithmTraits<kConfig.algorithm>::Output;
  const int row = blockIdx.y * kConfig.tile_m + threadIdx.x / kConfig.tile_n;
  const int column = blockIdx.x * kConfig.tile_n + threadIdx.x % kConfig.tile_n;
  if (row >= p.m || column >= p.n) return;
  constexpr bool kKMajorA = kMajorA == Major::kK;
  constexpr bool kKMajorB = kMajorB == Major::kK;
  const Input* a = static_cast<const Input*>(p.a) + (kKMajorA ? row * p.ld_a : row);
  const Input* b = static_cast<const Input*>(p.b) + (kKMajorB ? column * p.ld_b : column);
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
  if (sizeof(Output) == 4 || p.d_type == ElementType::kF32) {
    static_cast<float*>(p.d)[element] = acc;
  } else {
    static_cast<Output*>(p.d)[element] = Output(acc);
  }
}

template <typename Row, Major kMajorA, Major kMajorB>
__global__ void __launch_bounds__(Row::kConfig.threads())
    plain_kernel(const __grid_constant__ PlainParams params) {
  run_plain<Row::kConfig, kMajorA, kMajorB>(params);
}

}  // namespace jax_tcgemm::simt
