// Describes the operands of a problem to TMA.

#ifndef JAX_TCGEMM_SM90_TMA_DESCRIPTOR_H_
#define JAX_TCGEMM_SM90_TMA_DESCRIPTOR_H_

#include "common/status.h"
#include "gemm_problem.h"
#include "sm90/tensor_maps.h"

namespace jax_tcgemm::sm90 {

// Checks if TMA can write D and the further results.
bool d_by_tma(const GemmProblem& problem);

// Checks if there is a C that TMA can read. Otherwise threads read C.
bool c_by_tma(const GemmProblem& problem);

// Fills in all fields but the descriptors. The addresses need not be known.
void describe(const GemmProblem& problem, const KernelConfig& config, TensorMaps* maps);

// Fills in the descriptors of A and B for the tiles of `config`.
Status encode_factors(const GemmProblem& problem, const KernelConfig& config, TensorMaps* maps);

// Fills in the descriptors of A, B, C and the results.
Status encode_tensor_maps(const GemmProblem& problem, const KernelConfig& config, TensorMaps* maps);

}  // namespace jax_tcgemm::sm90

#endif  // JAX_TCGEMM_SM90_TMA_DESCRIPTOR_H_
