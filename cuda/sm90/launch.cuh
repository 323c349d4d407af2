// Launches a configuration of the sm90 family.

#pragma once

#include "dispatch/kernel_entry.h"
#include "sm90/kernel.cuh"
#include "sm90/layouts.cuh"
#include "sm90/output/output_tile.h"
#include "sm90/skinny_kernel.cuh"

namespace jax_tcgemm::sm90 {

using KernelPointer = void (*)(GemmParams, TensorMaps);

// Clusters that fit on the device at once; asked for once per kernel and device (`cache`).
inline cudaError_t prepare_kernel(KernelPointer kernel, const KernelConfig& config,
                                  const cudaLaunchConfig_t& launch, int device, int (&cache)[64],
                                  int* clusters) {
  const bool cacheable = device < 64;
  *clusters = cacheable ? __atomic_load_n(&cache[device], __ATOMIC_RELAXED) : 0;
  if (*clusters > 0) return cudaSuccess;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           config.shared_memory_bytes());
  if (error != cudaSuccess) return error;
  error = cudaOccupancyMaxActiveClusters(clusters, kernel, &launch);
  if (error == cudaSuccess && *clusters < 1) error = cudaErrorLaunchOutOfResources;
  if (error == cudaSuccess && cacheable)
    __atomic_store_n(&cache[device], *clusters, __ATOMIC_RELAXED);
  return error;
}

template <typename Row, bool kExchanged, typename... Layouts>
cudaError_t launch_layouts(const LaunchRequest& request) {
  constexpr KernelConfig kConfig = Row::kConfig;
  KernelPointer kernel;
  if constexpr (kConfig.skinny) {
    kernel = skinny_kernel<Row, Layouts...>;
  } else {
    kernel = gemm_kernel<Row, kExchanged, LayoutSet<Layouts...>>;
  }
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {kConfig.cluster_size(), 1, 1};
  attributes[1].id = cudaLaunchAttributeCooperative;
  attributes[1].val.cooperative = 1;
  cudaLaunchConfig_t launch = {};
  launch.gridDim = dim3(kConfig.cluster_size());
  launch.blockDim = dim3(kConfig.threads());
  launch.dynamicSmemBytes = kConfig.shared_memory_bytes();
  launch.stream = request.stream;
  launch.attrs = attributes;
  launch.numAttrs = 1;
  static int cache[64] = {};
  int capacity = 0;
  const cudaError_t error =
      prepare_kernel(kernel, kConfig, launch, request.device.ordinal, cache, &capacity);
  if (error != cudaSuccess) return error;

  GemmParams params = request.params;
  if constexpr (kConfig.ragged != Ragged::kNone) {
    launch.gridDim = dim3(capacity * kConfig.cluster_size());
    return cudaLaunchKernelEx(&launch, kernel, params, *request.maps);
  }
  const int64_t tiles = int64_t{params.raster.tiles.divisor} * params.batch;
  const int clusters = static_cast<int>(tiles < capacity ? tiles : capacity);
  params.raster.stride_batch = clusters / params.raster.tiles.divisor;
  params.raster.stride_index = clusters % params.raster.tiles.divisor;
  launch.gridDim = dim3(clusters * kConfig.cluster_size());
  if (params.fixup.parts > 0) {  // blocks wait for one another
    if (tiles > capacity) return cudaErrorCooperativeLaunchTooLarge;
    launch.numAttrs = 2;
  }
  return cudaLaunchKernelEx(&launch, kernel, params, *request.maps);
}

// Which operand is the longer one is known at run time.
template <typename Row>
cudaError_t launch_skinny(const LaunchRequest& request) {
  const bool k_major = request.maps->major_b == Major::kK;
  if (request.maps->major_a == Major::kK) {
    return k_major ? launch_layouts<Row, false, LayoutKK>(request)
                   : launch_layouts<Row, false, LayoutKMn>(request);
  }
  return k_major ? launch_layouts<Row, false, LayoutMnK>(request)
                 : launch_layouts<Row, false, LayoutMnMn>(request);
}

// A kernel for each layout.
template <typename Row>
cudaError_t launch_one_layout(const LaunchRequest& request) {
  constexpr KernelConfig kConfig = Row::kConfig;
  const bool k_major_b = request.major_b == Major::kK;
  if (request.major_a == Major::kK) {
    if (k_major_b) return launch_layouts<Row, false, LayoutKK>(request);
    if constexpr (exchanges_operands(kConfig, Major::kK, Major::kMn)) {
      return launch_layouts<Row, true, LayoutMnK>(request);
    } else {
      return launch_layouts<Row, false, LayoutKMn>(request);
    }
  }
  if (k_major_b) return launch_layouts<Row, false, LayoutMnK>(request);
  if constexpr (transposes_b(kConfig, Major::kMn, Major::kMn) && !can_transpose_b(kConfig)) {
    return cudaErrorNotSupported;
  } else {
    return launch_layouts<Row, false, LayoutMnMn>(request);
  }
}

// Of 32-bit operands each layout has a mainloop of a kind of its own. Small tiles are for products
// of a few microseconds, of which finding the layout's code takes 1 to 2 %.
constexpr bool has_kernel_for_each_layout(const KernelConfig& config) {
  return element_bytes(config.algorithm) == 4 || config.tile_m * config.tile_n <= 64 * 128;
}

template <typename Row>
cudaError_t launch(const LaunchRequest& request) {
  constexpr KernelConfig kConfig = Row::kConfig;
  if constexpr (kConfig.ragged == Ragged::kDepth) {
    return launch_layouts<Row, false, LayoutMnMn>(request);
  } else if constexpr (kConfig.ragged == Ragged::kRows) {
    return launch_layouts<Row, false, LayoutKMn, LayoutKK>(request);
  } else if constexpr (kConfig.exchanged) {
    return request.major_b == Major::kK ? launch_layouts<Row, true, LayoutKK>(request)
                                        : launch_layouts<Row, true, LayoutMnK>(request);
  } else if constexpr (kConfig.skinny) {
    return launch_skinny<Row>(request);
  } else if constexpr (has_kernel_for_each_layout(kConfig)) {
    return launch_one_layout<Row>(request);
  } else {
    return launch_layouts<Row, false, LayoutKMn, LayoutKK, LayoutMnMn, LayoutMnK>(request);
  }
}

}  // namespace jax_tcgemm::sm90
