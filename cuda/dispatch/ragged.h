// Products over groups whose sizes only the device knows.

#ifndef JAX_TCGEMM_DISPATCH_RAGGED_H_
#define JAX_TCGEMM_DISPATCH_RAGGED_H_

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "common/status.h"
#include "dispatch/device.h"
#include "gemm_problem.h"

namespace jax_tcgemm {

// The most tiles of clusters that there may be, whatever the groups' sizes are.
int64_t most_ragged_tiles(const GemmParams& params, const KernelConfig& config);

// The device counts the tiles of sm90 rows in 32 bits.
Status check_ragged_tiles(const GemmParams& params, const KernelConfig& config);

// As begin_gemm.
void begin_ragged(const GemmProblem& problem, Grouped grouped, const DeviceProperties& device);

// Enqueues one kernel. `problem` is a batch of one product a group, but that
//   kM: A and D have the rows of all groups one after the other, m of them, and no batch;
//   kK: A and B have the k of all groups one after the other, and no batch.
Status run_ragged(GemmProblem problem, Grouped grouped, const DeviceProperties& device,
                  cudaStream_t stream);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_DISPATCH_RAGGED_H_
