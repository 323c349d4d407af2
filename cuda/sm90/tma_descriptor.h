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

// Describes the rows of an operand of 16-bit floats, (batch, m, k), contiguous, where k is a
// multiple of 64. A copy takes `rows` rows of `k_blocks` blocks of 64 k, the blocks one after the
// other.
Status encode_packed_rows(const void* data, ElementType type, int64_t batch, int64_t m, int64_t k,
                          int rows, int k_blocks, TensorMap* map);

// Fills in the descriptors of A, B, C and the results.
Status encode_tensor_maps(const GemmProblem& problem, const KernelConfig& config, TensorMaps* maps);

}  // namespace jax_tcgemm::sm90

#endif  // JAX_TCGEMM_SM90_TMA_DESCRIPTOR_H_
