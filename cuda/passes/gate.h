// A kernel that holds a stream back until the host opens it. Work that is queued behind it
// meanwhile runs without gaps, however long each launch takes the host.

#ifndef JAX_TCGEMM_PASSES_GATE_H_
#define JAX_TCGEMM_PASSES_GATE_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jax_tcgemm {

// Enqueues gate `number`. It opens when `*opened`, in memory that the host writes, is at least
// `number`. It opens by itself after 20 ms, because nothing may wait for the host for ever.
cudaError_t launch_gate(const uint32_t* opened, uint32_t number, cudaStream_t stream);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_PASSES_GATE_H_
