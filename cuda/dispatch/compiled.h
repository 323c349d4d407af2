// Products whose epilogue is compiled at run time: a row of the kernel table with a program that
// came with the custom call.

#ifndef JAX_TCGEMM_DISPATCH_COMPILED_H_
#define JAX_TCGEMM_DISPATCH_COMPILED_H_

#include <cuda_runtime_api.h>

#include <functional>
#include <string>
#include <string_view>

#include "common/status.h"
#include "compiled_params.h"
#include "dispatch/device.h"
#include "gemm_problem.h"

namespace jax_tcgemm {

// C++ that defines a Program (sm90/output/compiled.cuh), and what it is known by.
struct EpilogueProgram {
  std::string_view digest;
  std::string_view source;
};

// Compiles a program into the kernel of a row for a layout of A and B ("nn", "nt", "tn", "tt").
using Compiler = std::function<Status(std::string_view source, std::string_view row,
                                      std::string_view layout, std::string* cubin)>;

// Who compiles; called once, on import.
void set_compiler(Compiler compiler);

// Compiles and loads what run_compiled will launch. `problem` has no addresses yet; those of XLA
// are multiples of 16 bytes.
Status prepare_compiled(const GemmProblem& problem, const EpilogueProgram& program,
                        const DeviceProperties& device);

// Enqueues the product. `params` are complete but for the tile order, and hold those of `problem`.
Status run_compiled(const GemmProblem& problem, const CompiledParams& params,
                    const EpilogueProgram& program, const DeviceProperties& device,
                    cudaStream_t stream);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_DISPATCH_COMPILED_H_
