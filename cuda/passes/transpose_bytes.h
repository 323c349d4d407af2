// The transpose of an operand of bytes, for wgmma takes operands of 8 bits along k alone. One pass
// over the operand costs a few percent of a large product.

#ifndef JAX_TCGEMM_PASSES_TRANSPOSE_BYTES_H_
#define JAX_TCGEMM_PASSES_TRANSPOSE_BYTES_H_

#include <cuda_runtime_api.h>
#include <stdint.h>

namespace jax_tcgemm {

// Multiples of so many elements are what rows of the transpose are filled up to, with zeros.
constexpr int kTransposedMultiple = 16;

// (batch, rows, columns), columns contiguous, and where (batch, columns, out_ld) goes.
struct TransposeProblem {
  const void* in;
  void* out;
  int32_t batch, rows, columns;
  int64_t in_ld, in_batch_stride;  // elements
  int32_t out_ld;                  // rows, filled up
};

cudaError_t launch_transpose(const TransposeProblem& problem, cudaStream_t stream);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_PASSES_TRANSPOSE_BYTES_H_
