// Models the time that an sm90 configuration would need, for heuristic.h.

#ifndef JAX_TCGEMM_DISPATCH_SM90_TIME_MODEL_H_
#define JAX_TCGEMM_DISPATCH_SM90_TIME_MODEL_H_

#include "dispatch/heuristic.h"
#include "kernel_config.h"

namespace jax_tcgemm::sm90 {

// Checks if the kernel itself adds up `splits` parts of k, instead of a second kernel. The
// conditions are:
//   - the blocks of all parts fit on the GPU at once;
//   - the row has the epilogue, which has no C;
//   - D has the narrower of its types and leaves by TMA;
//   - the workspace has kFixupFlagBytes, for a flag of each warp of each block, and room for the
//     blocks' accumulators.
bool has_fixup(const KernelConfig& config, const ChoiceInput& input, int splits);

// Returns the expected cycles, see jax_tcgemm::estimated_cycles.
double estimated_cycles(const KernelConfig& config, const ChoiceInput& input, int splits);

}  // namespace jax_tcgemm::sm90

#endif  // JAX_TCGEMM_DISPATCH_SM90_TIME_MODEL_H_
