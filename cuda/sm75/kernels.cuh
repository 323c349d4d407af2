// Lists the kernels of a row of the sm75 family.

#pragma once

#include "kernel_set.h"
#include "mma_sync/kernel_of_layouts.cuh"
#include "sm75/kernel.cuh"

namespace jax_tcgemm::sm75 {

template <typename Row>
KernelSet kernels_of() {
  return mma_sync::kernel_set<Row>([]<Major... kMajorsA>() {
    static KernelHandle handle = {reinterpret_cast<const void*>(gemm_kernel<Row, kMajorsA...>), {}};
    return &handle;
  });
}

}  // namespace jax_tcgemm::sm75
