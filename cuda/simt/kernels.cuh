// Lists the kernels of a row of the simt family.

#pragma once

#include "kernel_set.h"
#include "simt/fallback_kernel.cuh"
#include "simt/kernel.cuh"
#include "simt/plain_kernel.cuh"

namespace jax_tcgemm::simt {

template <typename Row, Major kMajorA, Major kMajorB>
KernelHandle* plain_handle() {
  static KernelHandle handle = {
      reinterpret_cast<const void*>(plain_kernel<Row, kMajorA, kMajorB>), {}};
  return &handle;
}

template <typename Row>
KernelSet kernels_of() {
  constexpr Major kK = Major::kK, kMn = Major::kMn;
  if constexpr (Row::kConfig.is_fallback()) {
    static KernelHandle all = {reinterpret_cast<const void*>(fallback_kernel<Row>), {}};
    return {{{{&all, &all}, {&all, &all}}}, {}};
  } else {
    static KernelHandle any = {reinterpret_cast<const void*>(gemm_kernel<Row>), {}};
    return {{{{&any, &any}, {&any, &any}}},
            {{{plain_handle<Row, kK, kK>(), plain_handle<Row, kK, kMn>()},
              {plain_handle<Row, kMn, kK>(), plain_handle<Row, kMn, kMn>()}}}};
  }
}

}  // namespace jax_tcgemm::simt
