// The planes of a float32 operand: see GemmParams::planes.

#ifndef JAX_TCGEMM_PASSES_SPLIT_PLANES_H_
#define JAX_TCGEMM_PASSES_SPLIT_PLANES_H_

#include <cuda_runtime_api.h>

#include "gemm_params.h"
#include "kernel_config.h"
#include "shared_limits.h"

namespace jax_tcgemm {

// An operand (batch, rows, columns), columns contiguous, and where its bfloat16 planes go. They are
// k-major, and lie one after the other along k, filled up with zeros to multiples of a k-tile.
struct SplitProblem {
  Operand in;
  void* out;
  Major major;  // k is the columns (kK) or the rows (kMn)
  int32_t count;
  bool pairs;  // columns are parts of complex numbers: see GemmParams::pairs_of_b
  int32_t rows, columns;
  int32_t plane_k;  // extent of a plane along k, a multiple of 64
  int64_t out_ld;   // elements
  int32_t batch_rank;
  int32_t batch_shape[kMaxBatchRank];  // 1 where the operand is broadcast
  BatchStrides out_batch;
};

// Bytes of the planes, whole lines of L2; sets `out_ld`, `out_batch` and `batch_shape` from the
// extents.
int64_t plan_split(SplitProblem* problem);

// Of two planes that are scaled the second is what the first leaves over, times 2^kPlaneBits, which
// is half of the number at most; and so on.
constexpr int kPlaneBits = 7;

// Enqueues the splitting of A and of B, and a second kernel that does it again if the numbers that
// the first has found take it. Tiny ones would lose bits of their last planes, and are multiplied
// by a power of two. Where that leaves float32's range, planes are scaled, and their products kept
// apart (sm90/plane_loop.cuh): of infinities and of sums that are beyond that range nothing but NaN
// is left over for planes after the first.
cudaError_t launch_splits(const SplitProblem (&problems)[2], void* state, cudaStream_t stream);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_PASSES_SPLIT_PLANES_H_
