// The number of tiles of simt/fallback_kernel.cuh.

#ifndef JAX_TCGEMM_SIMT_FALLBACK_TILES_H_
#define JAX_TCGEMM_SIMT_FALLBACK_TILES_H_

#include <stdint.h>

#include "common/ceil_div.h"
#include "gemm_params.h"
#include "kernel_config.h"

namespace jax_tcgemm::simt {

// The rows of all groups form one matrix.
constexpr int64_t fallback_tiles(const GemmParams& params, const KernelConfig& config) {
  return ceil_div(params.m, config.tile_m) * ceil_div(params.n, config.output_n()) *
         (config.grouped == Grouped::kM ? 1 : params.batch);
}

}  // namespace jax_tcgemm::simt

#endif  // JAX_TCGEMM_SIMT_FALLBACK_TILES_H_
