// The known facts about an sm75 or sm80 row compiled at run time: see sm90/run_time_row.cuh.

#pragma once

#include "kernel_config.h"
#include "mma_sync/kernel_of_layouts.cuh"

namespace jax_tcgemm::mma_sync {

constexpr KernelConfig known_config(KernelConfig config) {
  if (config.epilogue == EpilogueWork::kAny && JAX_TCGEMM_KNOWN_SUM && !config.is_direct()) {
    config.epilogue = EpilogueWork::kSum;
  }
  return config;
}

// Visits the one layout of the kernel; see visit_majors.
struct KnownMajors {
  template <typename Use>
  __device__ __forceinline__ void operator()(Use&& use) const {
    use(Majors<kMajorA, kMajorB>());
  }
};

}  // namespace jax_tcgemm::mma_sync
