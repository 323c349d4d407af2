// Lists the kernels of a row of the simt family.

#pragma once

#include "kernel_set.h"
#include "simt/fallback_kernel.cuh"
#include "simt/kernel.cuh"
#include "simt/plain_kernel.cuh"

namespace jax_tcgemm::simt {

template <typename Row, Major kMajorA, Major kMajorB>
void add_layout(KernelSet* set) {
  constexpr int kA = static_cast<int>(kMajorA), kB = static_cast<int>(kMajorB);
  static KernelHandle any = {reinterpret_cast<const void*>(gemm_kernel<Row, kMajorA, kMajorB>), {}};
  static KernelHandle simple = {reinterpret_cast<const void*>(plain_kernel<Row, kMajorA, kMajorB>),
                                {}};
  set->any.handle[kA][kB] = &any;
  set->simple.handle[kA][kB] = &simple;
}

template <typename Row>
KernelSet kernels_of() {
  if constexpr (Row::kConfig.is_fallback()) {
    static KernelHandle all = {reinterpret_cast<const void*>(fallback_kernel<Row>), {}};
    return {{{{&all, &all}, {&all, &all}}}, {}};
  } else {
    KernelSet set = {};
    add_layout<Row, Major::kK, Major::kK>(&set);
    add_layout<Row, Major::kK, Major::kMn>(&set);
    add_layout<Row, Major::kMn, Major::kK>(&set);
    add_layout<Row, Major::kMn, Major::kMn>(&set);
    return set;
  }
}

}  // namespace jax_tcgemm::simt
