// The second half of a product whose k was split among blocks: computes D from the partial sums.

#ifndef JAX_TCGEMM_PASSES_SUM_SPLITS_H_
#define JAX_TCGEMM_PASSES_SUM_SPLITS_H_

#include <cuda_runtime_api.h>

#include "gemm_params.h"

namespace jax_tcgemm {

// Computes D = epilogue(sum of `splits` float32 (m, n) matrices, added in a fixed order). n is a
// multiple of kVectorColumns. `params` are those of the whole product, without a batch. D and the
// addends have `type` if they are not float32.
cudaError_t launch_sum_splits(const GemmParams& params, ElementType type, const float* partial,
                              int splits, cudaStream_t stream);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_PASSES_SUM_SPLITS_H_
