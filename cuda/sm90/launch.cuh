// Launches a configuration of the sm90 family.

#pragma once

#include "kernel_entry.h"
#include "sm90/kernel.cuh"
#include "sm90/output_tile.h"
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

template <typename Row, Major kMajorA, Major kMajorB, bool kExchanged>
cudaError_t launch_layouts(const LaunchRequest& request) {
  constexpr KernelConfig kConfig = Row::kConfig;
  KernelPointer kernel;
  if constexpr (kConfig.skinny) {
    kernel = skinny_kernel<Row, kMajorA, kMajorB>;
  } else {
    kernel = gemm_kernel<Row, kMajorA, kMajorB, kExchanged>;
  }
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kConfig.cluster_size(), 1, 1};
  cudaLaunchConfig_t launch = {};
  launch.gridDim = dim3(kConfig.cluster_size());
  launch.blockDim = dim3(kConfig.threads());
  launch.dynamicSmemBytes = kConfig.shared_memory_bytes();
  launch.stream = request.stream;
  launch.attrs = &cluster;
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
  return cudaLaunchKernelEx(&launch, kernel, params, *request.maps);
}

// Which operand is the longer one is known at run time.
template <typename Row>
cudaError_t launch_skinny(const LaunchRequest& request) {
  constexpr Major kK = Major::kK;
  constexpr Major kMn = Major::kMn;
  const bool exchanged = request.maps->exchanged;
  const Major long_major = exchanged ? request.major_b : request.major_a;
  const bool k_major = (exchanged ? request.major_a : request.major_b) == kK;
  if (long_major == kK) {
    return k_major ? launch_layouts<Row, kK, kK, false>(request)
                   : launch_layouts<Row, kK, kMn, false>(request);
  }
  return k_major ? launch_layouts<Row, kMn, kK, false>(request)
                 : launch_layouts<Row, kMn, kMn, false>(request);
}

template <typename Row>
cudaError_t launch_any_layout(const LaunchRequest& request) {
  constexpr Major kK = Major::kK;
  constexpr Major kMn = Major::kMn;
  constexpr bool kExchanges = exchanges_operands(Row::kConfig, kK, kMn);
  const bool k_major_b = request.major_b == kK;
  if (request.major_a == kK) {
    if (k_major_b) return launch_layouts<Row, kK, kK, false>(request);
    if constexpr (kExchanges)
      return launch_layouts<Row, kMn, kK, true>(request);
    else
      return launch_layouts<Row, kK, kMn, false>(request);
  }
  if (k_major_b) return launch_layouts<Row, kMn, kK, false>(request);
  if constexpr (transposes_b(Row::kConfig, kMn, kMn) && !can_transpose_b(Row::kConfig))
    return cudaErrorNotSupported;
  else
    return launch_layouts<Row, kMn, kMn, false>(request);
}

template <typename Row>
cudaError_t launch(const LaunchRequest& request) {
  constexpr Major kK = Major::kK;
  constexpr Major kMn = Major::kMn;
  if constexpr (Row::kConfig.ragged == Ragged::kDepth) {
    return launch_layouts<Row, kMn, kMn, false>(request);
  } else if constexpr (Row::kConfig.ragged == Ragged::kRows) {
    return request.major_b == kK ? launch_layouts<Row, kK, kK, false>(request)
                                 : launch_layouts<Row, kK, kMn, false>(request);
  } else if constexpr (Row::kConfig.skinny) {
    return launch_skinny<Row>(request);
  } else {
    return launch_any_layout<Row>(request);
  }
}

}  // namespace jax_tcgemm::sm90
