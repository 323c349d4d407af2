// Questions to CUDA that several parts of the extension ask.

#ifndef JAX_TCGEMM_COMMON_DRIVER_H_
#define JAX_TCGEMM_COMMON_DRIVER_H_

#include <cuda_runtime_api.h>

#include "common/status.h"

namespace jax_tcgemm {

// Finds a function of the driver, without linking to the driver: the module must import on machines
// without one.
template <typename Function>
Status find_driver_function(const char* name, Function* function) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult query;
  JAX_TCGEMM_CUDA_CHECK(
      cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &query), name);
  JAX_TCGEMM_REQUIRE(query == cudaDriverEntryPointSuccess, "the driver has no ", name);
  *function = reinterpret_cast<Function>(found);
  return Status();
}

// Checks if a stream captures a graph. Kernels cannot be loaded meanwhile.
inline Status is_captured(cudaStream_t stream, bool* result) {
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  JAX_TCGEMM_CUDA_CHECK(cudaStreamIsCapturing(stream, &capturing), "asking for a capture");
  *result = capturing != cudaStreamCaptureStatusNone;
  return Status();
}

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_COMMON_DRIVER_H_
