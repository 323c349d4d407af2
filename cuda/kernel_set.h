// The kernels of a row, as a family (sm90/kernels.cuh, sm80/, simt/) gives them to the dispatch.

#ifndef JAX_TCGEMM_KERNEL_SET_H_
#define JAX_TCGEMM_KERNEL_SET_H_

#include "kernel_config.h"

namespace jax_tcgemm {

constexpr int kMaxDevices = 64;  // with cached answers

// A kernel, as CUDA's runtime takes it: a __global__ function, or a cudaKernel_t.
struct KernelHandle {
  const void* function;
  // Blocks on an SM, or clusters on the device (sm90), that fit at once; 0: not known yet.
  int resident[kMaxDevices];
};

// Kernels by the layouts of A and B. Several layouts may share a kernel; null: there is none.
struct KernelsByLayout {
  KernelHandle* handle[2][2];  // [major of A][major of B]

  KernelHandle* operator()(Major a, Major b) const {
    return handle[static_cast<int>(a)][static_cast<int>(b)];
  }
};

// The kernels of a row.
struct KernelSet {
  KernelsByLayout any;  // for every problem of the row
  // Kernels for short epilogues, if there are any:
  //   sm90: for Finish before kActivate;
  //   simt: for one product of two matrices and nothing else, by PlainParams;
  //   direct rows of sm80: for alpha * product + bias, by DirectParams.
  KernelsByLayout simple;
};

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_KERNEL_SET_H_
