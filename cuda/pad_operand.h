// A copy of an operand whose rows start and end on 16-byte boundaries, for operands that cp.async
// cannot address. One pass over the operand is much cheaper than realigning every tile of it each
// time it is read.

#ifndef JAX_TCGEMM_PAD_OPERAND_H_
#define JAX_TCGEMM_PAD_OPERAND_H_

#include <cuda_runtime_api.h>

#include "gemm_params.h"

namespace jax_tcgemm {

// An operand (batch, rows, columns), columns contiguous, and where its padded copy goes.
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

// Bytes of the copy; sets `out_ld` and `out_batch` from the extents.
int64_t plan_pad(PadProblem* problem);

// Enqueues the copy.
cudaError_t launch_pad(const PadProblem& problem, cudaStream_t stream);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_PAD_OPERAND_H_
