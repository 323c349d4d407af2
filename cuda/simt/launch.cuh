// The kernels of the simt family, for common/launch.cuh.

#pragma once

#include "common/launch.cuh"
#include "simt/kernel.cuh"

namespace jax_tcgemm::simt {

struct Family {
  template <typename Row, Major kMajorA, Major kMajorB>
  static KernelPointer kernel() {
    return gemm_kernel<Row, kMajorA, kMajorB>;
  }
};

}  // namespace jax_tcgemm::simt
