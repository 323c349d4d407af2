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

extern "C" __global__ void __launch_bounds__(kConfig.threads(), mma_sync::min_blocks(kConfig))
    compiled_kernel(const __grid_constant__ GemmParams params,
                    const __grid_constant__ mma_sync::Layouts) {
  extern __shared__ __align__(128) char smem[];
  Kernel<kConfig>::run(params, ptx::shared_address(smem), mma_sync::KnownMajors());
}

}  // namespace jax_tcgemm::sm75
