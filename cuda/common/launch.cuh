// Launches a kernel of the sm80 or simt family: picks the instantiation for the operands' layouts,
// sizes the persistent grid and enqueues it.

#pragma once

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "dispatch/kernel_entry.h"

namespace jax_tcgemm {

using KernelPointer = void (*)(GemmParams);

// Blocks of a kernel that fit on one SM; asked for once per kernel and device (`cache`).
template <typename Pointer>
cudaError_t prepare_kernel(Pointer kernel, const KernelConfig& config, int device, int (&cache)[64],
                           int* blocks_per_sm) {
  const bool cacheable = device < 64;
  *blocks_per_sm = cacheable ? __atomic_load_n(&cache[device], __ATOMIC_RELAXED) : 0;
  if (*blocks_per_sm > 0) return cudaSuccess;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           config.shared_memory_bytes());
  if (error != cudaSuccess) return error;
  error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks_per_sm, kernel, config.threads(),
                                                        config.shared_memory_bytes());
  if (error == cudaSuccess && *blocks_per_sm < 1) error = cudaErrorLaunchOutOfResources;
  if (error == cudaSuccess && cacheable) {
    __atomic_store_n(&cache[device], *blocks_per_sm, __ATOMIC_RELAXED);
  }
  return error;
}

// Enqueues a kernel of this configuration, with what it takes beside the parameters.
template <typename Row, typename Pointer, typename... Others>
cudaError_t launch_persistent(Pointer kernel, int (&cache)[64], const LaunchRequest& request,
                              const Others&... others) {
  constexpr KernelConfig kConfig = Row::kConfig;
  int blocks_per_sm = 0;
  const cudaError_t error =
      prepare_kernel(kernel, kConfig, request.device.ordinal, cache, &blocks_per_sm);
  if (error != cudaSuccess) return error;

  GemmParams params = request.params;
  const int64_t tiles = int64_t{params.raster.tiles.divisor} * params.batch;
  const int64_t capacity = int64_t{blocks_per_sm} * request.device.sm_count;
  const int blocks = static_cast<int>(tiles < capacity ? tiles : capacity);
  params.raster.stride_batch = blocks / params.raster.tiles.divisor;
  params.raster.stride_index = blocks % params.raster.tiles.divisor;
  cudaLaunchConfig_t launch = {};
  launch.gridDim = dim3(blocks);
  launch.blockDim = dim3(kConfig.threads());
  launch.dynamicSmemBytes = kConfig.shared_memory_bytes();
  launch.stream = request.stream;
  return cudaLaunchKernelEx(&launch, kernel, params, others...);
}

// `Family::kernel<Row, kMajorA, kMajorB>()` is the kernel of a configuration (Row::kConfig).
template <typename Family, typename Row, Major kMajorA, Major kMajorB>
cudaError_t launch_layouts(const LaunchRequest& request) {
  static int cache[64] = {};
  const KernelPointer kernel = Family::template kernel<Row, kMajorA, kMajorB>();
  return launch_persistent<Row>(kernel, cache, request);
}

template <typename Family, typename Row>
cudaError_t launch_row(const LaunchRequest& request) {
  constexpr Major kK = Major::kK;
  constexpr Major kMn = Major::kMn;
  if (request.major_a == kK) {
    return request.major_b == kK ? launch_layouts<Family, Row, kK, kK>(request)
                                 : launch_layouts<Family, Row, kK, kMn>(request);
  }
  return request.major_b == kK ? launch_layouts<Family, Row, kMn, kK>(request)
                               : launch_layouts<Family, Row, kMn, kMn>(request);
}

}  // namespace jax_tcgemm
