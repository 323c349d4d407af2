// Multiplies a cotangent by the derivative of an activation, and sums the product over the rows:
// the gradients of a layer's activation and bias.

#ifndef JAX_TCGEMM_PASSES_ACTIVATION_GRADIENT_H_
#define JAX_TCGEMM_PASSES_ACTIVATION_GRADIENT_H_

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "gemm_params.h"

namespace jax_tcgemm {

// Neighbouring columns that a thread reads at once; jax_tcgemm/primitives/activation_gradient.py
// has the same.
constexpr int kGradientColumns = 8;

// D = cotangent * f'(Z): three dense matrices of `rows` by `n` 16-bit elements. The addresses and
// the rows' sizes are multiples of 16 bytes. The rows are divided into `parts`.
struct ActivationGradient {
  const void* cotangent;
  const void* z;
  void* d;
  int64_t rows;
  int32_t n;
  int32_t parts;
  Activation activation;
  float activation_parameters[kActivationParameters];
  float* partial_sums;    // (parts, n), or null: no sums
  void* sums;             // (n,)
  ElementType sums_type;  // the type of the matrices, or float32
};

// Enqueues the pass. `type` is the type of the matrices.
cudaError_t launch_activation_gradient(const ActivationGradient& problem, ElementType type,
                                       cudaStream_t stream);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_PASSES_ACTIVATION_GRADIENT_H_
