// Launches a configuration of the simt family.

#pragma once

#include <stdint.h>

#include <algorithm>

#include "common/ceil_div.h"
#include "common/launch.cuh"
#include "epilogue/work.h"
#include "simt/fallback_kernel.cuh"
#include "simt/kernel.cuh"
#include "simt/plain_kernel.cuh"

namespace jax_tcgemm::simt {

struct Family {
  template <typename Row, Major kMajorA, Major kMajorB>
  static KernelPointer kernel() {
    return gemm_kernel<Row, kMajorA, kMajorB>;
  }
};

template <typename Row>
auto choose_plain_kernel(Major major_a, Major major_b) {
  constexpr Major kK = Major::kK;
  constexpr Major kMn = Major::kMn;
  if (major_a == kK) return major_b == kK ? plain_kernel<Row, kK, kK> : plain_kernel<Row, kK, kMn>;
  return major_b == kK ? plain_kernel<Row, kMn, kK> : plain_kernel<Row, kMn, kMn>;
}

template <typename Row>
cudaError_t launch_fallback(const LaunchRequest& request) {
  constexpr int64_t kBlocksPerSm = 16;  // whether or not they run at once
  const int64_t tiles = fallback_tiles(request.params, Row::kConfig);
  const int64_t blocks = std::min(tiles, kBlocksPerSm * request.device.sm_count);
  cudaLaunchConfig_t launch = {};
  launch.gridDim = dim3(static_cast<unsigned>(blocks));
  launch.blockDim = dim3(Row::kConfig.threads());
  launch.stream = request.stream;
  return cudaLaunchKernelEx(&launch, fallback_kernel<Row>, request.params,
                            request.major_a == Major::kK, request.major_b == Major::kK);
}

template <typename Row>
cudaError_t launch_gemm(const LaunchRequest& request) {
  const GemmParams& params = request.params;
  constexpr KernelConfig kConfig = Row::kConfig;
  const int64_t rows = ceil_div(params.m, kConfig.tile_m);
  if (params.batch != 1 || !is_plain(params.epilogue) || rows > 65535) {  // what y of a grid takes
    return launch_row<Family, Row>(request);
  }
  const int64_t columns = ceil_div(params.n, kConfig.tile_n);
  const PlainParams plain = {params.a.data, params.b.data, params.epilogue.d,
                             params.a.ld,   params.b.ld,   params.m,
                             params.n,      params.k,      params.epilogue.d_is_float32};
  cudaLaunchConfig_t launch = {};
  launch.gridDim = dim3(static_cast<unsigned>(columns), static_cast<unsigned>(rows));
  launch.blockDim = dim3(kConfig.threads());
  launch.stream = request.stream;
  return cudaLaunchKernelEx(&launch, choose_plain_kernel<Row>(request.major_a, request.major_b),
                            plain);
}

template <typename Row>
cudaError_t launch(const LaunchRequest& request) {
  if constexpr (Row::kConfig.is_fallback()) {
    return launch_fallback<Row>(request);
  } else {
    return launch_gemm<Row>(request);
  }
}

}  // namespace jax_tcgemm::simt
