// A cotangent times the derivative of an activation, and the sums of that over the rows: what goes
// back through a layer's activation and to its bias.

#ifndef JAX_TCGEMM_PASSES_ACTIVATION_GRADIENT_H_
#define JAX_TCGEMM_PASSES_ACTIVATION_GRADIENT_H_

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "gemm_params.h"

namespace jax_tcgemm {

// Neighbouring columns that a thread reads at once; jax_tcgemm/primitives/activation_gradient.py
// has the same.
constexpr int kGradientColumns = 8;

// D = cotangent * f'(Z), three dense matrices of `rows` by `n` elements of 16 bits, with addresses
// and n in multiples of 16 bytes. Their rows are divided into `parts`.
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
  ElementType sums_type;  // that of the matrices, or float32
};

// `type` is that of the matrices.
cudaError_t launch_activation_gradient(const ActivationGradient& problem, ElementType type,
                                       cudaStream_t stream);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_PASSES_ACTIVATION_GRADIENT_H_
