// Transposes an 8-bit operand, because wgmma takes only k-major 8-bit operands. One pass over the
// operand costs a few percent of a large product.

#ifndef JAX_TCGEMM_PASSES_TRANSPOSE_BYTES_H_
#define JAX_TCGEMM_PASSES_TRANSPOSE_BYTES_H_

#include <cuda_runtime_api.h>
#include <stdint.h>

namespace jax_tcgemm {

// Rows of the transpose are padded with zeros to multiples of so many elements.
constexpr int kTransposedMultiple = 16;

// A matrix (batch, rows, columns) with contiguous columns, and the place of its transpose (batch,
// columns, out_ld).
struct TransposeProblem {
  const void* in;
  void* out;
  int32_t batch, rows, columns;
  int64_t in_ld, in_batch_stride;  // elements
  int32_t out_ld;                  // `rows`, padded
};

cudaError_t launch_transpose(const TransposeProblem& problem, cudaStream_t stream);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_PASSES_TRANSPOSE_BYTES_H_
