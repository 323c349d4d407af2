// Launches a kernel. What there is to know of it are values: a configuration and handles, whether
// they were compiled with the package or at run time.

#ifndef JAX_TCGEMM_DISPATCH_LAUNCH_H_
#define JAX_TCGEMM_DISPATCH_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "dispatch/device.h"
#include "dispatch/kernel_entry.h"
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
  // Collectives may hold SMs for a while: blocks are to end now and then, so that those that find
  // no room at first have less of the work.
  bool beside_collectives = false;
};

// Says if a direct row of sm80 has no more to do than alpha * sum + bias, of one batch dimension at
// most: its kernel for that takes DirectParams.
bool takes_line(const GemmParams& params);

// Returns the kernel of the build for a request; null: there is none.
KernelHandle* built_kernel(const KernelConfig& config, const KernelSet& kernels,
                           const LaunchRequest& request);

// Enqueues the kernel. Capturable: no allocation, no synchronisation.
cudaError_t launch_kernel(const KernelConfig& config, KernelHandle* kernel,
                          const LaunchRequest& request);

// The same of an sm90 kernel with an epilogue compiled at run time; request.params are
// CompiledParams.
cudaError_t launch_compiled(const KernelConfig& config, KernelHandle* kernel,
                            const LaunchRequest& request);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_DISPATCH_LAUNCH_H_
