// The kernel of a row that is compiled at run time. jax_tcgemm/epilogue/source.py defines Row,
// kMajorA and kMajorB (the layouts of what the kernel calls A and B). dispatch/run_time_row.cc
// defines what is known of the epilogue.

#pragma once

#include "gemm_params.h"
#include "kernel_config.h"
#include "sm90/kernel.cuh"
#include "sm90/layouts.cuh"
#include "sm90/skinny_kernel.cuh"
#include "sm90/tensor_maps.h"

namespace jax_tcgemm::sm90 {

constexpr KernelConfig known_config(const KernelConfig& config) {
  const bool is_simple = static_cast<Finish>(JAX_TCGEMM_KNOWN_FINISH) < Finish::kActivate;
  const bool has_simple = config.split_k == 1 || config.skinny;
  return config.epilogue == EpilogueWork::kAny && is_simple && has_simple
             ? with_simple_epilogue(config)
             : config;
}

constexpr KernelConfig kConfig = known_config(Row::kConfig);
using Layouts = LayoutSet<Layout<kMajorA, kMajorB>>;

#if JAX_TCGEMM_KNOWN_SKINNY
extern "C" __global__ void __cluster_dims__(kConfig.cluster_size(), 1, 1)
    __launch_bounds__(kConfig.threads(), kConfig.blocks_on_sm())
        compiled_kernel(const __grid_constant__ GemmParams params,
                        const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) char smem[];
  SkinnyKernel<kConfig, Layouts>::run(params, maps, {ptx::shared_address(smem)});
}
#else
extern "C" __global__ void __launch_bounds__(kConfig.threads(), kConfig.blocks_on_sm())
    compiled_kernel(const __grid_constant__ GemmParams params,
                    const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) char smem[];
  Kernel<kConfig, JAX_TCGEMM_KNOWN_SWAP_AB, Layouts>::run(params, maps,
                                                          {ptx::shared_address(smem)});
}
#endif

}  // namespace jax_tcgemm::sm90
