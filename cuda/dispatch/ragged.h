// Products over groups whose sizes only the device knows. GemmProblem::grouped says what they
// divide:
//   kM: A and D have no batch: they hold the rows of all groups one after the other, m in total;
//   kK: A and B have no batch: they hold the k of all groups one after the other.

#ifndef JAX_TCGEMM_DISPATCH_RAGGED_H_
#define JAX_TCGEMM_DISPATCH_RAGGED_H_

#include <stdint.h>

#include "common/status.h"
#include "gemm_params.h"
#include "kernel_config.h"

namespace jax_tcgemm {

// Returns the most cluster tiles that there may be, whatever the groups' sizes are.
int64_t most_ragged_tiles(const GemmParams& params, const KernelConfig& config);

// Checks the number of tiles: the device counts the tiles of sm90 rows in 32 bits.
Status check_ragged_tiles(const GemmParams& params, const KernelConfig& config);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_DISPATCH_RAGGED_H_
