// Copies an operand that the kernels cannot address, so that its rows begin on multiples of 16
// bytes. Long rows begin at lines of L2, because TMA requests every line that a row touches. One
// pass over the operand is much cheaper than realigning each of its tiles each time it is read.

#ifndef JAX_TCGEMM_PASSES_PAD_OPERAND_H_
#define JAX_TCGEMM_PASSES_PAD_OPERAND_H_

#include <cuda_runtime_api.h>

#include "gemm_params.h"

namespace jax_tcgemm {

// An operand (batch, rows, columns) with contiguous columns, and the place of its padded copy.
struct PadProblem {
  Operand in;
  void* out;
  int32_t element_bytes;
  int32_t rows, columns;
  int64_t out_ld;  // elements
  int32_t batch_rank;
  int32_t batch_shape[kMaxBatchRank];  // 1 where the operand is broadcast
  BatchStrides out_batch;
};

// Returns the bytes of the copy, in whole lines of L2. Sets `out_ld` and `out_batch` from the
// extents.
int64_t plan_pad(PadProblem* problem);

// Enqueues one or two copies, as one kernel.
cudaError_t launch_pads(const PadProblem* problems, int count, cudaStream_t stream);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_PASSES_PAD_OPERAND_H_
