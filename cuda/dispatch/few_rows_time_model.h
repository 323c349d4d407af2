// Models the time of the sm90 rows that are bound by reading one operand once, for
// sm90_time_model.h.

#ifndef JAX_TCGEMM_DISPATCH_FEW_ROWS_TIME_MODEL_H_
#define JAX_TCGEMM_DISPATCH_FEW_ROWS_TIME_MODEL_H_

#include "dispatch/heuristic.h"
#include "kernel_config.h"

namespace jax_tcgemm::sm90 {

// Returns the expected cycles of a skinny row.
double skinny_cycles(const KernelConfig& config, const ChoiceInput& input);

// Returns the expected cycles of a row that streams an 8-bit B.
double streamed_cycles(const KernelConfig& config, const ChoiceInput& input);

}  // namespace jax_tcgemm::sm90

#endif  // JAX_TCGEMM_DISPATCH_FEW_ROWS_TIME_MODEL_H_
