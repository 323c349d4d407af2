#include "dispatch/compiled_pass.h"

#include <limits>
#include <mutex>

#include "common/ceil_div.h"
#include "common/driver.h"
#include "common/saturating.h"
#include "dispatch/program_library.h"

namespace jax_tcgemm {

namespace {

KernelKey key_on(const DeviceProperties& device) {
  return {.compute_capability = device.compute_capability};
}

// Returns an error for a GPU that lacks instructions of the pass.
Status check_pass(const DeviceProperties& device) {
  JAX_TCGEMM_REQUIRE(device.compute_capability >= 80, device.name, " has compute capability ",
                     device.compute_capability / 10, ".", device.compute_capability % 10,
                     "; a pass for derivatives needs 8.0 or later");
  return Status();
}

}  // namespace

Status prepare_pass(const EpilogueProgram& program, const DeviceProperties& device) {
  JAX_TCGEMM_RETURN_IF_ERROR(check_pass(device));
  const auto loaded = loaded_program(program);
  std::unique_lock<std::mutex> lock(loaded->mutex);
  LoadedKernel* kernel = nullptr;
  return find_or_make_kernel(program, key_on(device), &lock, loaded.get(), &kernel);
}

Status run_pass(const CompiledParams& params, const EpilogueProgram& program,
                const DeviceProperties& device, cudaStream_t stream) {
  JAX_TCGEMM_RETURN_IF_ERROR(check_pass(device));
  bool capturing = false;
  JAX_TCGEMM_RETURN_IF_ERROR(is_captured(stream, &capturing));
  const auto loaded = loaded_program(program);
  LoadedKernel* kernel = nullptr;
  {
    std::unique_lock<std::mutex> lock(loaded->mutex);
    kernel = find_kernel(loaded.get(), key_on(device));
    JAX_TCGEMM_REQUIRE(kernel != nullptr || !capturing,
                       "no kernel of this pass is loaded while a graph is captured");
    if (kernel == nullptr) {
      JAX_TCGEMM_RETURN_IF_ERROR(
          find_or_make_kernel(program, key_on(device), &lock, loaded.get(), &kernel));
    }
  }
  const int64_t blocks = mul_sat(mul_sat(params.batch, ceil_div(params.m, kPassRows)),
                                 ceil_div(params.n, kPassColumns));
  JAX_TCGEMM_REQUIRE(blocks <= std::numeric_limits<int32_t>::max(), blocks, " blocks");
  cudaLaunchConfig_t launch = {};
  launch.gridDim = dim3(static_cast<unsigned>(blocks));
  launch.blockDim = dim3(kPassThreads);
  launch.stream = stream;
  void* arguments[] = {const_cast<CompiledParams*>(&params)};
  JAX_TCGEMM_CUDA_CHECK(cudaLaunchKernelExC(&launch, kernel->made.handle.function, arguments),
                        "launching a compiled pass for m=", params.m, " n=", params.n);
  return Status();
}

}  // namespace jax_tcgemm
