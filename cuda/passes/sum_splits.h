// The second half of a product whose k was split among blocks: D from the partial sums.

#ifndef JAX_TCGEMM_PASSES_SUM_SPLITS_H_
#define JAX_TCGEMM_PASSES_SUM_SPLITS_H_

#include <cuda_runtime_api.h>

#include "gemm_params.h"
#include "kernel_config.h"

namespace jax_tcgemm {

// D = epilogue(sum of `splits` float32 (m, n) matrices, added in a fixed order). n is a multiple of
// kVectorColumns. `params` are those of the whole product, without a batch.
cudaError_t launch_sum_splits(const GemmParams& params, Algorithm algorithm, const float* partial,
                              int splits, cudaStream_t stream);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_PASSES_SUM_SPLITS_H_
