// The time that an sm90 configuration would need: what heuristic.h compares.

#ifndef JAX_TCGEMM_SM90_TIME_MODEL_H_
#define JAX_TCGEMM_SM90_TIME_MODEL_H_

#include <stdint.h>

#include "heuristic.h"
#include "kernel_config.h"

namespace jax_tcgemm::sm90 {

// Clusters at a time. A cluster's blocks share a GPC, and not every GPC has a multiple of 4 SMs.
int64_t concurrent_clusters(const KernelConfig& config, const ChoiceInput& input);

// Clusters' tiles in all batches, of k in so many parts.
int64_t cluster_tiles(const KernelConfig& config, const ChoiceInput& input, int splits);

// See jax_tcgemm::estimated_cycles.
double estimated_cycles(const KernelConfig& config, const ChoiceInput& input, int splits);

}  // namespace jax_tcgemm::sm90

#endif  // JAX_TCGEMM_SM90_TIME_MODEL_H_
