// A copy of an operand whose rows begin with lines of L2, for operands that neither TMA nor cp.async
// can address. One pass over the operand is much cheaper than realigning every tile of it each time
// it is read.

#ifndef JAX_TCGEMM_PAD_OPERAND_H_
#define JAX_TCGEMM_PAD_OPERAND_H_

#include <cuda_runtime_api.h>

#include "gemm_params.h"

namespace jax_tcgemm {

// Rows that are a part of two lines would cost TMA both. jax_tcgemm/alignment.py has the same number.
constexpr int64_t kPaddedPitchBytes = 128;

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

// Enqueues one or two copies, as one kernel.
cudaError_t launch_pads(const PadProblem* problems, int count, cudaStream_t stream);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_PAD_OPERAND_H_
