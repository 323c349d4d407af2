// Describes the operands of a problem to TMA.

#ifndef JAX_TCGEMM_SM90_TMA_DESCRIPTOR_H_
#define JAX_TCGEMM_SM90_TMA_DESCRIPTOR_H_

#include "common/status.h"
#include "gemm_problem.h"
#include "sm90/tensor_maps.h"

namespace jax_tcgemm::sm90 {

// Whether TMA can write D and further results.
bool d_by_tma(const GemmProblem& problem);

// Whether it can read C, which there is. What it cannot, threads read.
bool c_by_tma(const GemmProblem& problem);

// Fills in what there is beside descriptors, of which addresses need not be known.
void describe(const GemmProblem& problem, const KernelConfig& config, TensorMaps* maps);

// Fills in how TMA sees A and B, for the tiles of `config`.
Status encode_factors(const GemmProblem& problem, const KernelConfig& config, TensorMaps* maps);

// Likewise, and C and the results.
Status encode_tensor_maps(const GemmProblem& problem, const KernelConfig& config, TensorMaps* maps);

}  // namespace jax_tcgemm::sm90

#endif  // JAX_TCGEMM_SM90_TMA_DESCRIPTOR_H_
