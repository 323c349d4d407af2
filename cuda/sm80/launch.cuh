// Launches a configuration of the sm80 family.

#pragma once

#include "common/launch.cuh"
#include "sm80/kernel.cuh"

namespace jax_tcgemm::sm80 {

struct Family {
  template <typename Row, Major kMajorA, Major kMajorB>
  static KernelPointer kernel() {
    return gemm_kernel<Row, kMajorA, kMajorB>;
  }
};

template <typename Row>
cudaError_t launch(const LaunchRequest& request) {
  return launch_row<Family, Row>(request);
}

}  // namespace jax_tcgemm::sm80
