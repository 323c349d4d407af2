// The kernels: one entry for each row of the kernel table that was built, or that is compiled at
// run time.

#ifndef JAX_TCGEMM_DISPATCH_KERNEL_ENTRY_H_
#define JAX_TCGEMM_DISPATCH_KERNEL_ENTRY_H_

#include "kernel_config.h"
#include "kernel_set.h"

namespace jax_tcgemm {

struct KernelEntry {
  const char* name;
  KernelConfig config;
  const KernelSet* kernels;  // null: there are none in the build
};

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_DISPATCH_KERNEL_ENTRY_H_
