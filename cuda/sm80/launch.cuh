// The kernels of the sm80 family, for common/launch.cuh.

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

}  // namespace jax_tcgemm::sm80
