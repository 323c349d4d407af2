// Compiles, loads and launches the kernels for packed weights.

#ifndef JAX_TCGEMM_DISPATCH_PACKED_H_
#define JAX_TCGEMM_DISPATCH_PACKED_H_

#include <cuda_runtime_api.h>

#include <string_view>

#include "common/status.h"
#include "compiled_params.h"
#include "packed_config.h"

namespace jax_tcgemm {

struct PackedProblem {
  PackedConfig config;
  PackedParams params;
  const void* x;  // (batch, m, k), contiguous
  int64_t batch;
  std::string_view digest;  // of the kernel
  // The kernel's program and the parameters of a function that gets the products. They are empty
  // and null if there is none.
  std::string_view program;
  const CompiledParams* function;
};

struct UnpackProblem {
  PackedConfig config;  // of which the types and the format count
  UnpackParams params;
  int64_t batch;
  std::string_view digest;
};

// Checks that a kernel can be compiled for a configuration.
Status check_packed(const PackedConfig& config);

// Compiles and loads the kernel. `program` is that of a PackedProblem.
Status prepare_packed(const PackedConfig& config, std::string_view digest,
                      std::string_view program);

// Launches the kernel.
Status run_packed(const PackedProblem& problem, cudaStream_t stream);

// The same for the pass that dequantizes a weight.
Status prepare_unpack(const PackedConfig& config, std::string_view digest);
Status run_unpack(const UnpackProblem& problem, cudaStream_t stream);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_DISPATCH_PACKED_H_
