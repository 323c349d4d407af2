// The rows of the kernel table, and which of their kernels are in the build. Other kernels are
// compiled when they are first needed.

#ifndef JAX_TCGEMM_DISPATCH_KERNEL_ENTRY_H_
#define JAX_TCGEMM_DISPATCH_KERNEL_ENTRY_H_

#include "kernel_config.h"
#include "kernel_set.h"

namespace jax_tcgemm {

struct KernelEntry {
  const char* name;
  KernelConfig config;
  // Says if the build has kernels of the row, and for which of its epilogues.
  bool is_built;
  EpilogueWork built_epilogue;
  const KernelSet* kernels;  // null: there are none, or the build is without CUDA

  // Returns the row with the epilogues of the build.
  constexpr KernelConfig built_config() const {
    KernelConfig built = config;
    built.epilogue = built_epilogue;
    return built;
  }
};

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_DISPATCH_KERNEL_ENTRY_H_
