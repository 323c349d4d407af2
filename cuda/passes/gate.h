// A kernel that holds a stream back until the host opens it: what is queued behind it meanwhile
// runs without a gap, however long each launch takes the host.

#ifndef JAX_TCGEMM_PASSES_GATE_H_
#define JAX_TCGEMM_PASSES_GATE_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jax_tcgemm {

// Enqueues gate `number`, which opens once `*opened`, in memory that the host writes, is at least
// that: or by itself after 20 ms, for nothing may wait for the host for ever.
cudaError_t launch_gate(const uint32_t* opened, uint32_t number, cudaStream_t stream);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_PASSES_GATE_H_
