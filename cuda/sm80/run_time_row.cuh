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

}  // namespace jax_tcgemm::sm80

#if JAX_TCGEMM_KNOWN_PLAIN
extern "C" __global__ void __launch_bounds__(jax_tcgemm::sm80::kConfig.threads())
    compiled_kernel(const __grid_constant__ jax_tcgemm::sm80::DirectParams params) {
  extern __shared__ __align__(128) char memory[];
  jax_tcgemm::sm80::DirectKernel<jax_tcgemm::sm80::kConfig>::run_plain<jax_tcgemm::kMajorA,
                                                                       jax_tcgemm::kMajorB>(
      params, jax_tcgemm::ptx::shared_address(memory));
}
#elif JAX_TCGEMM_KNOWN_DIRECT
extern "C" __global__ void __launch_bounds__(jax_tcgemm::sm80::kConfig.threads())
    compiled_kernel(const __grid_constant__ jax_tcgemm::GemmParams params,
                    const __grid_constant__ jax_tcgemm::mma_sync::Layouts) {
  extern __shared__ __align__(128) char memory[];
  jax_tcgemm::sm80::DirectKernel<jax_tcgemm::sm80::kConfig>::run(
      params, jax_tcgemm::ptx::shared_address(memory), jax_tcgemm::mma_sync::KnownMajors());
}
#else
extern "C" __global__ void __launch_bounds__(
    jax_tcgemm::sm80::kConfig.threads(),
    jax_tcgemm::mma_sync::min_blocks(jax_tcgemm::sm80::kConfig))
    compiled_kernel(const __grid_constant__ jax_tcgemm::GemmParams params,
                    const __grid_constant__ jax_tcgemm::mma_sync::Layouts) {
  extern __shared__ __align__(128) char smem[];
  jax_tcgemm::sm80::Kernel<jax_tcgemm::sm80::kConfig>::run(
      params, jax_tcgemm::ptx::shared_address(smem), jax_tcgemm::mma_sync::KnownMajors());
}
#endif
