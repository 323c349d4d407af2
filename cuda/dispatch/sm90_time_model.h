// The time that an sm90 configuration would need, for heuristic.h.

#ifndef JAX_TCGEMM_DISPATCH_SM90_TIME_MODEL_H_
#define JAX_TCGEMM_DISPATCH_SM90_TIME_MODEL_H_

#include "dispatch/heuristic.h"
#include "kernel_config.h"

namespace jax_tcgemm::sm90 {

// Whether the kernel itself adds up so many parts of k, and not a second one: all of them must be
// on the GPU at once, the row has the epilogue, of which C is no part, and D is of the narrower of
// its types and leaves by TMA. They need kFixupFlagBytes of the workspace, for a flag of each warp
// of each block, and room for their accumulators.
bool has_fixup(const KernelConfig& config, const ChoiceInput& input, int splits);

// See jax_tcgemm::estimated_cycles.
double estimated_cycles(const KernelConfig& config, const ChoiceInput& input, int splits);

}  // namespace jax_tcgemm::sm90

#endif  // JAX_TCGEMM_DISPATCH_SM90_TIME_MODEL_H_
