// Products whose epilogue is compiled at run time: a row of the kernel table with a program from
// the custom call.

#ifndef JAX_TCGEMM_DISPATCH_COMPILED_H_
#define JAX_TCGEMM_DISPATCH_COMPILED_H_

#include <cuda_runtime_api.h>

#include "common/status.h"
#include "compiled_params.h"
#include "dispatch/device.h"
#include "dispatch/run_time_kernel.h"
#include "gemm_problem.h"

namespace jax_tcgemm {

// Compiles and loads the kernel that run_compiled will launch. `problem` has no addresses yet;
// XLA's addresses are multiples of 16 bytes.
Status prepare_compiled(const GemmProblem& problem, const EpilogueProgram& program,
                        const DeviceProperties& device);

// Enqueues the product. `params` are complete except for the tile order, and include those of
// `problem`.
Status run_compiled(GemmProblem problem, const CompiledParams& params,
                    const EpilogueProgram& program, const DeviceProperties& device,
                    cudaStream_t stream);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_DISPATCH_COMPILED_H_
