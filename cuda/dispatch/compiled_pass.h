// Runs a program from the custom call as a pass over its operands: passes/compiled_pass.cuh.

#ifndef JAX_TCGEMM_DISPATCH_COMPILED_PASS_H_
#define JAX_TCGEMM_DISPATCH_COMPILED_PASS_H_

#include <cuda_runtime_api.h>

#include "common/status.h"
#include "compiled_params.h"
#include "dispatch/device.h"
#include "dispatch/run_time_kernel.h"

namespace jax_tcgemm {

// Compiles and loads the kernel that run_pass will launch.
Status prepare_pass(const EpilogueProgram& program, const DeviceProperties& device);

// Enqueues the pass. `params` hold the shape, the operands and the results.
Status run_pass(const CompiledParams& params, const EpilogueProgram& program,
                const DeviceProperties& device, cudaStream_t stream);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_DISPATCH_COMPILED_PASS_H_
