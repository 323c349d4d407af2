// Products over groups whose sizes only the device knows.

#ifndef JAX_TCGEMM_DISPATCH_RAGGED_H_
#define JAX_TCGEMM_DISPATCH_RAGGED_H_

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "common/status.h"
#include "dispatch/device.h"
#include "gemm_problem.h"

namespace jax_tcgemm {

// Returns the most cluster tiles that there may be, whatever the groups' sizes are.
int64_t most_ragged_tiles(const GemmParams& params, const KernelConfig& config);

// Checks the number of tiles: the device counts the tiles of sm90 rows in 32 bits.
Status check_ragged_tiles(const GemmParams& params, const KernelConfig& config);

// Begins to compile the kernel that the problem will need, as begin_gemm does.
void begin_ragged(const GemmProblem& problem, Grouped grouped, const DeviceProperties& device);

// Enqueues one kernel. `problem` is a batch with one product for each group, with two exceptions:
//   kM: A and D have no batch: they hold the rows of all groups one after the other, m in total;
//   kK: A and B have no batch: they hold the k of all groups one after the other.
Status run_ragged(GemmProblem problem, Grouped grouped, const DeviceProperties& device,
                  cudaStream_t stream);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_DISPATCH_RAGGED_H_
