// Lays out 4-bit values, as a program stores them, for the kernels that read packed weights. One
// pass over the weight, for programs that multiply by a weight that nobody has packed.

#ifndef JAX_TCGEMM_PASSES_PACK_VALUES_H_
#define JAX_TCGEMM_PASSES_PACK_VALUES_H_

#include <cuda_runtime_api.h>
#include <stdint.h>

namespace jax_tcgemm {

// The values of a vector. Rows of a matrix are whole vectors.
constexpr int kPackVectorValues = 32;

// Matrices of 4-bit values without gaps, two in a byte, the first one low: (batch, k, n), or
// (batch, n, k) if they are `transposed`. jax_tcgemm/lowering/packed_layout.py describes the layout
// of `out`.
struct PackProblem {
  const void* in;
  void* out;
  int32_t batch;
  int32_t n, k;  // k is a multiple of 64; rows are whole vectors
  bool transposed;
  uint32_t flipped;  // bits of eight values to flip: 0x88888888 turns int4 into codes
};

cudaError_t launch_pack(const PackProblem& problem, cudaStream_t stream);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_PASSES_PACK_VALUES_H_
