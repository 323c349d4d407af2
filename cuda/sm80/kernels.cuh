// Lists the kernels of a row of the sm80 family.

#pragma once

#include "kernel_set.h"
#include "mma_sync/kernel_of_layouts.cuh"
#include "sm80/direct_kernel.cuh"
#include "sm80/kernel.cuh"

namespace jax_tcgemm::sm80 {

template <typename Row, Major kMajorA, Major kMajorB>
KernelHandle* direct_plain_handle() {
  static KernelHandle handle = {
      reinterpret_cast<const void*>(direct_plain_kernel<Row, kMajorA, kMajorB>), {}};
  return &handle;
}

template <typename Row>
KernelSet direct_kernels_of() {
  constexpr Major kK = Major::kK, kMn = Major::kMn;
  static KernelHandle any = {reinterpret_cast<const void*>(direct_kernel<Row>), {}};
  return {{{{&any, &any}, {&any, &any}}},
          {{{direct_plain_handle<Row, kK, kK>(), direct_plain_handle<Row, kK, kMn>()},
            {direct_plain_handle<Row, kMn, kK>(), direct_plain_handle<Row, kMn, kMn>()}}}};
}

template <typename Row>
KernelSet kernels_of() {
  if constexpr (Row::kConfig.is_direct()) {
    return direct_kernels_of<Row>();
  } else {
    return mma_sync::kernel_set<Row>([]<Major... kMajorsA>() {
      static KernelHandle handle = {reinterpret_cast<const void*>(gemm_kernel<Row, kMajorsA...>),
                                    {}};
      return &handle;
    });
  }
}

}  // namespace jax_tcgemm::sm80
