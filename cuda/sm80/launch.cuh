// Launches a configuration of the sm80 family.

#pragma once

#include "common/launch.cuh"
#include "sm80/kernel.cuh"

namespace jax_tcgemm::sm80 {

template <typename Row, Major... kMajorsA>
cudaError_t launch_kernel(const LaunchRequest& request) {
  static int cache[64] = {};
  const Layouts layouts = {request.major_a, request.major_b};
  return launch_persistent<Row>(gemm_kernel<Row, kMajorsA...>, cache, request, layouts);
}

template <typename Row>
cudaError_t launch(const LaunchRequest& request) {
  if constexpr (has_kernel_for_each_major_a(Row::kConfig)) {
    return request.major_a == Major::kK ? launch_kernel<Row, Major::kK>(request)
                                        : launch_kernel<Row, Major::kMn>(request);
  } else {
    return launch_kernel<Row>(request);
  }
}

}  // namespace jax_tcgemm::sm80
