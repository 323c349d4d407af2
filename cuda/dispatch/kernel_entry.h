// The compiled kernels: one entry for each row of the kernel table that was built.

#ifndef JAX_TCGEMM_DISPATCH_KERNEL_ENTRY_H_
#define JAX_TCGEMM_DISPATCH_KERNEL_ENTRY_H_

#include <cuda_runtime_api.h>

#include "dispatch/device.h"
#include "gemm_params.h"
#include "kernel_config.h"

namespace jax_tcgemm {

namespace sm90 {
struct TensorMaps;
}

struct LaunchRequest {
  const GemmParams& params;  // complete but for the grid's strides
  Major major_a;
  Major major_b;
  const sm90::TensorMaps* maps;  // null but for sm90 kernels
  const DeviceProperties& device;
  cudaStream_t stream;
};

// Enqueues a kernel. Capturable: no allocation, no synchronisation.
using KernelLaunch = cudaError_t(const LaunchRequest& request);

struct KernelEntry {
  const char* name;
  KernelConfig config;
  KernelLaunch* launch;
};

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_DISPATCH_KERNEL_ENTRY_H_
