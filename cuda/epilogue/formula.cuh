// Applies the epilogue to z = alpha * scales * acc + bias in float32 (see RoleOfC and
// EpilogueParams). sm80 and sm90 kernels differ only in the callbacks, which read and write the
// values.

#pragma once

#include "epilogue/activations.cuh"
#include "epilogue/known.cuh"
#include "gemm_params.h"
#include "scheduler/raster.cuh"

namespace jax_tcgemm {

__device__ __forceinline__ float scalar_of(const GemmParams& params, int batch,
                                           const Scalar& scalar) {
  return scalar.data ? scalar.data[batch_offset(params, batch, scalar.batch)] : scalar.value;
}

__device__ __forceinline__ bool takes_derivative(RoleOfC role) {
  return role == RoleOfC::kDerivative || role == RoleOfC::kGatedDerivative;
}

// value += beta * C
template <int kWidth, typename LoadC>
__device__ __forceinline__ void add_c(float beta, float (&value)[kWidth], LoadC&& load_c) {
  float c[kWidth];
  load_c(c);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) value[i] = fmaf(beta, c[i], value[i]);
}

// value *= C
template <int kWidth, typename LoadC>
__device__ __forceinline__ void multiply_c(float (&value)[kWidth], LoadC&& load_c) {
  float c[kWidth];
  load_c(c);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) value[i] *= c[i];
}

// value *= f'(C); if gated, also stores z * f(C) and computes value *= C2. Few values are live at a
// time.
template <int kWidth, typename LoadC, typename LoadC2, typename StoreAux>
__device__ __forceinline__ void multiply_derivative(const EpilogueParams& epilogue,
                                                    float (&value)[kWidth], LoadC&& load_c,
                                                    LoadC2&& load_c2, StoreAux&& store_aux) {
  float c[kWidth];
  float slope[kWidth];
  load_c(c);
  visit_activation(epilogue, [&]<ActivationFunctor Functor>(const Functor& functor) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) differentiate(functor, c[i], slope[i]);
  });
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    c[i] *= value[i];
    value[i] *= slope[i];
  }
  if (known_role_of_c(epilogue) != RoleOfC::kGatedDerivative) return;
  load_c2(slope);
  store_aux(c);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) value[i] *= slope[i];
}

// The epilogues that have code: those with the derivative at C, the others, or both.
enum class Derivatives { kOnly, kNone, kBoth };

// value: z -> D. Calls each load at most once. Calls store_aux if and only if there is a second
// result.
template <Derivatives kDerivatives = Derivatives::kBoth, int kWidth, typename LoadC,
          typename LoadC2, typename StoreAux>
__device__ __forceinline__ void finish_values(const EpilogueParams& epilogue, float beta,
                                              float (&value)[kWidth], LoadC&& load_c,
                                              LoadC2&& load_c2, StoreAux&& store_aux) {
  const RoleOfC role = known_role_of_c(epilogue);
  if constexpr (kDerivatives != Derivatives::kNone) {
    if (kDerivatives == Derivatives::kOnly || takes_derivative(role)) {
      return multiply_derivative(epilogue, value, load_c, load_c2, store_aux);
    }
  }
  if constexpr (kDerivatives == Derivatives::kOnly) return;
  const bool has_c = epilogue.c.data != nullptr;
  if (has_c && role == RoleOfC::kAdd) add_c(beta, value, load_c);
  if (epilogue.aux != nullptr) store_aux(value);
  visit_activation(epilogue, [&]<ActivationFunctor Functor>(const Functor& functor) {
    apply_activation(functor, value);
  });
  if (has_c && role == RoleOfC::kResidual) add_c(beta, value, load_c);
  if (has_c && role == RoleOfC::kFactor) multiply_c(value, load_c);
}

}  // namespace jax_tcgemm
