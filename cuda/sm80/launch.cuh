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
cudaError_t launch(const GemmParams& params, Major major_a, Major major_b,
                   const DeviceProperties& device, cudaStream_t stream) {
  return launch_row<Family, Row>(params, major_a, major_b, device, stream);
}

}  // namespace jax_tcgemm::sm80
