// The compiled kernels: one entry for each row of the kernel table that was built.

#ifndef JAX_TCGEMM_DISPATCH_KERNEL_ENTRY_H_
#define JAX_TCGEMM_DISPATCH_KERNEL_ENTRY_H_

#include "kernel_config.h"

namespace jax_tcgemm {

constexpr int kMaxDevices = 64;  // whose answers are kept

// A kernel, as CUDA's runtime takes it: a __global__ function, or a cudaKernel_t.
struct KernelHandle {
  const void* function;
  // Blocks on an SM, or clusters on the device (sm90), that fit at once; 0: not asked for yet.
  int resident[kMaxDevices];
};

// The kernels of a row by the layouts of A and B. One may be there for several; null: the row does
// not take these operands.
struct KernelSet {
  KernelHandle* by_layout[2][2];  // [major of A][major of B]
  // simt: for one product of two matrices and nothing else.
  KernelHandle* plain[2][2];

  KernelHandle* of(Major a, Major b) const {
    return by_layout[static_cast<int>(a)][static_cast<int>(b)];
  }
};

struct KernelEntry {
  const char* name;
  KernelConfig config;
  const KernelSet* kernels;
};

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_DISPATCH_KERNEL_ENTRY_H_
