// The kernel of a row that is compiled at run time: see sm90/run_time_row.cuh.

#pragma once

#include "gemm_params.h"
#include "kernel_config.h"
#include "mma_sync/kernel_of_layouts.cuh"
#include "mma_sync/layouts.h"
#include "mma_sync/run_time_row.cuh"
#include "sm80/direct_kernel.cuh"
#include "sm80/direct_params.h"
#include "sm80/kernel.cuh"

namespace jax_tcgemm::sm80 {

constexpr KernelConfig kConfig = mma_sync::known_config(Row::kConfig);

#if JAX_TCGEMM_KNOWN_PLAIN
extern "C" __global__ void __launch_bounds__(kConfig.threads())
    compiled_kernel(const __grid_constant__ DirectParams params) {
  extern __shared__ __align__(128) char memory[];
  DirectKernel<kConfig>::run_plain<kMajorA, kMajorB>(params, ptx::shared_address(memory));
}
#elif JAX_TCGEMM_KNOWN_DIRECT
extern "C" __global__ void __launch_bounds__(kConfig.threads())
    compiled_kernel(const __grid_constant__ GemmParams params,
                    const __grid_constant__ mma_sync::Layouts) {
  extern __shared__ __align__(128) char memory[];
  DirectKernel<kConfig>::run(params, ptx::shared_address(memory), mma_sync::KnownMajors());
}
#else
extern "C" __global__ void __launch_bounds__(kConfig.threads(), mma_sync::min_blocks(kConfig))
    compiled_kernel(const __grid_constant__ GemmParams params,
                    const __grid_constant__ mma_sync::Layouts) {
  extern __shared__ __align__(128) char smem[];
  Kernel<kConfig>::run(params, ptx::shared_address(smem), mma_sync::KnownMajors());
}
#endif

}  // namespace jax_tcgemm::sm80
