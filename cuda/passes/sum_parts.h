// Adds up the parts of a sum that devices have sent.

#ifndef JAX_TCGEMM_PASSES_SUM_PARTS_H_
#define JAX_TCGEMM_PASSES_SUM_PARTS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "arithmetic.h"

namespace jax_tcgemm {

// The bytes that a thread adds up of each part.
constexpr int64_t kSumPartsBytes = 16;

// Computes d[i] = sum of parts[p][i] over p, in the order of p, in float32, rounded once. The parts
// lie one after the other and have `elements` elements of `type` each, as d does. The bytes of a
// part are a multiple of kSumPartsBytes.
cudaError_t launch_sum_parts(const void* parts, int count, int64_t elements, ElementType type,
                             void* d, cudaStream_t stream);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_PASSES_SUM_PARTS_H_
