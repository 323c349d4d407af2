// Launches a problem's kernels: copies of unaligned operands, the product, the sum of its parts.

#ifndef JAX_TCGEMM_DISPATCH_DISPATCH_H_
#define JAX_TCGEMM_DISPATCH_DISPATCH_H_

#include <cuda_runtime_api.h>

#include "common/status.h"
#include "dispatch/device.h"
#include "dispatch/heuristic.h"
#include "dispatch/kernel_entry.h"
#include "gemm_problem.h"

namespace jax_tcgemm {

// Returns the facts on which the choice of a row depends; `used` bytes of the workspace are taken.
ChoiceInput choice_input(const GemmProblem& problem, const DeviceProperties& device, int64_t used);

// Sets the tile order: bands of a fixed number of rows of D, whatever the tile. The blocks of one
// wave then read few enough rows of A and columns of B to share them in L2. The device orders the
// tiles of groups, so the function only checks how many there may be.
Status set_tile_order(const GemmProblem& problem, const KernelConfig& config, GemmParams* params);

// Checks if a launch failed because the device has no room for a cluster of this row. If so, it
// notes that in `device`, and later choices are among rows with smaller clusters.
bool cluster_too_large(cudaError_t launched, const KernelConfig& config,
                       const DeviceProperties& device);

// Begins to compile the kernel that the problem will need, if the build lacks it. The addresses
// need not be known: an operand that exists may have any address.
void begin_gemm(GemmProblem problem, const DeviceProperties& device);

// Enqueues the problem on `stream` of `device`.
Status run_gemm(GemmProblem problem, const DeviceProperties& device, cudaStream_t stream);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_DISPATCH_DISPATCH_H_
