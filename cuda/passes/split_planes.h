// Splits float32 operands into planes: see GemmParams::planes.

#ifndef JAX_TCGEMM_PASSES_SPLIT_PLANES_H_
#define JAX_TCGEMM_PASSES_SPLIT_PLANES_H_

#include <cuda_runtime_api.h>

#include "gemm_params.h"
#include "kernel_config.h"
#include "shared_limits.h"

namespace jax_tcgemm {

// An operand (batch, rows, columns) with contiguous columns, and the place of its bfloat16 planes.
// The planes are k-major. They follow each other along k, padded with zeros to multiples of a
// k-tile.
struct SplitProblem {
  Operand in;
  void* out;
  Major major;  // k is the columns (kK) or the rows (kMn)
  int32_t count;
  bool pairs;  // columns are real and imaginary parts: see GemmParams::pairs_of_b
  int32_t rows, columns;
  int32_t plane_k;  // extent of a plane along k, a multiple of 64
  int64_t out_ld;   // elements
  int32_t batch_rank;
  int32_t batch_shape[kMaxBatchRank];  // 1 where the operand is broadcast
  BatchStrides out_batch;
};

// Returns the bytes of the planes, in whole lines of L2. Sets `out_ld`, `out_batch` and
// `batch_shape` from the extents.
int64_t plan_split(SplitProblem* problem);

// A scaled second plane is the remainder after the first one, times 2^kPlaneBits. That is half of
// the number at most. Further planes follow the same rule.
constexpr int kPlaneBits = 7;

// Enqueues a kernel that splits A and B, and a second one that splits them again if the numbers
// that the first has found need scales:
//   - Tiny numbers would lose bits of their last planes, so the operand is multiplied by a power of
//     two.
//   - If that leaves float32's range, the planes are scaled instead, and their products are kept
//     apart (sm90/plane_loop.cuh).
// Infinities, and sums beyond float32's range, leave nothing but NaN for planes after the first.
cudaError_t launch_splits(const SplitProblem (&problems)[2], void* state, cudaStream_t stream);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_PASSES_SPLIT_PLANES_H_
