// Launches a kernel, given by values: a configuration and handles. The kernel may come from the
// build or be compiled at run time.

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
  const GemmParams& params;  // complete except for the grid's strides
  Major major_a;
  Major major_b;
  const sm90::TensorMaps* maps;  // for sm90 kernels, else null
  const DeviceProperties& device;
  cudaStream_t stream;
  // Collectives may hold SMs for a while. The grid then has shorter-lived blocks, so that a block
  // without room at first delays less work.
  bool beside_collectives = false;
};

// Checks if a direct row of sm80 computes no more than alpha * sum + bias, with one batch dimension
// at most: its kernel for that takes DirectParams.
bool takes_line(const GemmParams& params);

// Returns the build's kernel for a request, or null if there is none.
KernelHandle* built_kernel(const KernelConfig& config, const KernelSet& kernels,
                           const LaunchRequest& request);

// Enqueues the kernel. Capturable: no allocation, no synchronisation.
cudaError_t launch_kernel(const KernelConfig& config, KernelHandle* kernel,
                          const LaunchRequest& request);

// Checks if all blocks of an sm90 kernel run at the same time, as they must to add up parts of k.
bool fits_at_once(const KernelConfig& config, KernelHandle* kernel, const GemmParams& params,
                  const DeviceProperties& device);

// Enqueues an sm90 or sm80 kernel with an epilogue compiled at run time; request.params are
// CompiledParams.
cudaError_t launch_compiled(const KernelConfig& config, KernelHandle* kernel,
                            const LaunchRequest& request);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_DISPATCH_LAUNCH_H_
