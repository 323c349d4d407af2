// The kernel of a row that is compiled at run time: see sm90/run_time_row.cuh.

#pragma once

#include "gemm_params.h"
#include "kernel_config.h"
#include "mma_sync/layouts.h"
#include "mma_sync/run_time_row.cuh"
#include "ptx/shared_memory.cuh"
#include "sm75/kernel.cuh"

namespace jax_tcgemm::sm75 {

constexpr KernelConfig kConfig = mma_sync::known_config(Row::kConfig);

}  // namespace jax_tcgemm::sm75

extern "C" __global__ void __launch_bounds__(
    jax_tcgemm::sm75::kConfig.threads(),
    jax_tcgemm::mma_sync::min_blocks(jax_tcgemm::sm75::kConfig))
    compiled_kernel(const __grid_constant__ jax_tcgemm::GemmParams params,
                    const __grid_constant__ jax_tcgemm::mma_sync::Layouts) {
  extern __shared__ __align__(128) char smem[];
  jax_tcgemm::sm75::Kernel<jax_tcgemm::sm75::kConfig>::run(
      params, jax_tcgemm::ptx::shared_address(smem), jax_tcgemm::mma_sync::KnownMajors());
}
