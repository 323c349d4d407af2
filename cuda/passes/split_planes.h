// The planes of a float32 operand: see GemmParams::planes.

#ifndef JAX_TCGEMM_PASSES_SPLIT_PLANES_H_
#define JAX_TCGEMM_PASSES_SPLIT_PLANES_H_

#include <cuda_runtime_api.h>

#include "gemm_params.h"
#include "kernel_config.h"

namespace jax_tcgemm {

// An operand (batch, rows, columns), columns contiguous, and where its bfloat16 planes go. They lie
// one after the other along k, filled up with zeros to multiples of a k-tile.
struct SplitProblem {
  Operand in;
  void* out;
  Major major;  // k is the columns (kK) or the rows (kMn)
  int32_t count;
  int32_t rows, columns;
  int32_t plane_k;  // extent of a plane along k
  int64_t out_ld;   // elements
  int32_t batch_rank;
  int32_t batch_shape[kMaxBatchRank];  // 1 where the operand is broadcast
  BatchStrides out_batch;
};

// Bytes of the planes, whole lines of L2; sets `out_ld`, `out_batch` and `batch_shape` from the
// extents.
int64_t plan_split(SplitProblem* problem);

// Enqueues the splitting of A and of B, as one kernel.
cudaError_t launch_splits(const SplitProblem (&problems)[2], cudaStream_t stream);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_PASSES_SPLIT_PLANES_H_
