// Copies operands into the workspace in a form that a kernel takes: padded, or split into planes.

#ifndef JAX_TCGEMM_DISPATCH_OPERAND_COPIES_H_
#define JAX_TCGEMM_DISPATCH_OPERAND_COPIES_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/status.h"
#include "dispatch/device.h"
#include "gemm_problem.h"

namespace jax_tcgemm {

// Replaces unaligned operands by padded copies in the workspace, of which `*used` bytes are taken,
// as far as there is room.
Status pad_unaligned_operands(GemmProblem* problem, const DeviceProperties& device, int64_t* used,
                              cudaStream_t stream);

// Replaces float32 operands by their planes in the workspace, of which `*used` bytes are taken.
Status split_into_planes(GemmProblem* problem, int64_t* used, cudaStream_t stream);

// Checks if a kernel takes the planes of a problem.
bool takes_planes(const GemmProblem& problem, const DeviceProperties& device);

// Selects a slow row that takes float32 operands as they are, if no kernel takes planes. This
// happens if a program was made for another GPU, or if the epilogue's kernel cannot be compiled.
Status take_operands_as_they_are(GemmProblem* problem);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_DISPATCH_OPERAND_COPIES_H_
