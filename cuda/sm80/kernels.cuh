// The kernels of a row of the sm80 family.

#pragma once

#include "kernel_set.h"
#include "sm80/kernel.cuh"

namespace jax_tcgemm::sm80 {

template <typename Row, Major... kMajorsA>
KernelHandle* kernel_for() {
  static KernelHandle handle = {reinterpret_cast<const void*>(gemm_kernel<Row, kMajorsA...>), {}};
  return &handle;
}

template <typename Row>
KernelSet kernels_of() {
  if constexpr (has_kernel_for_each_major_a(Row::kConfig)) {
    KernelHandle* const k_major = kernel_for<Row, Major::kK>();
    KernelHandle* const mn_major = kernel_for<Row, Major::kMn>();
    return {{{{k_major, k_major}, {mn_major, mn_major}}}, {}};
  } else {
    KernelHandle* const all = kernel_for<Row>();
    return {{{{all, all}, {all, all}}}, {}};
  }
}

}  // namespace jax_tcgemm::sm80
