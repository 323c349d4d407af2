// The compiled kernels: one entry for each row of the kernel table that was built.

#ifndef JAX_TCGEMM_KERNEL_ENTRY_H_
#define JAX_TCGEMM_KERNEL_ENTRY_H_

#include <cuda_runtime_api.h>

#include "device.h"
#include "gemm_params.h"
#include "kernel_config.h"

namespace jax_tcgemm {

// Enqueues a kernel; `params` is complete but for the grid's strides. Capturable: no allocation, no
// synchronisation.
using KernelLaunch = cudaError_t(const GemmParams& params, Major major_a, Major major_b,
                                 const DeviceProperties& device, cudaStream_t stream);

struct KernelEntry {
  const char* name;
  KernelConfig config;
  KernelLaunch* launch;
};

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_KERNEL_ENTRY_H_
