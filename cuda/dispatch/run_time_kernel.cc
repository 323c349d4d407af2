#include "dispatch/run_time_kernel.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <mutex>
#include <utility>

#include "common/driver.h"

namespace jax_tcgemm {
namespace {

// The kernel's name in the compiled code; the same as in jax_tcgemm/epilogue/source.py.
constexpr const char* kKernelName = "compiled_kernel";

struct Slot {
  std::mutex mutex;
  Compiler compiler;
};

Slot& slot() {
  static Slot* const slot = new Slot;  // never freed: code that runs at exit may use it
  return *slot;
}

Compiler current_compiler() {
  const std::lock_guard<std::mutex> lock(slot().mutex);
  return slot().compiler;
}

Status load(const std::string& cubin, std::string_view row, RunTimeKernel* kernel) {
  decltype(&cuLibraryLoadData) load_data = nullptr;
  decltype(&cuLibraryGetKernel) get_kernel = nullptr;
  JAX_TCGEMM_RETURN_IF_ERROR(find_driver_function("cuLibraryLoadData", &load_data));
  JAX_TCGEMM_RETURN_IF_ERROR(find_driver_function("cuLibraryGetKernel", &get_kernel));
  CUlibrary library = nullptr;
  CUkernel found = nullptr;
  CUresult result = load_data(&library, cubin.data(), nullptr, nullptr, 0, nullptr, nullptr, 0);
  if (result == CUDA_SUCCESS) {
    kernel->library = library;
    result = get_kernel(&found, library, kKernelName);
    if (result != CUDA_SUCCESS) unload(*kernel);
  }
  JAX_TCGEMM_REQUIRE(result == CUDA_SUCCESS, "loading a kernel of ", cubin.size(), " bytes for ",
                     row, ": CUresult ", static_cast<int>(result));
  kernel->handle = {found, {}};
  // This call also loads the kernel now, because it cannot be loaded while a graph is captured.
  cudaFuncAttributes attributes = {};
  const cudaError_t error = cudaFuncGetAttributes(&attributes, found);
  if (error != cudaSuccess) unload(*kernel);
  JAX_TCGEMM_CUDA_CHECK(error, row);
  kernel->local_bytes = static_cast<int>(attributes.localSizeBytes);
  return Status();
}

}  // namespace

void set_compiler(Compiler compiler) {
  const std::lock_guard<std::mutex> lock(slot().mutex);
  slot().compiler = std::move(compiler);
}

Status make_kernel(const KernelSource& source, RunTimeKernel* kernel) {
  const Compiler compiler = current_compiler();
  JAX_TCGEMM_REQUIRE(compiler.compile != nullptr, "nothing compiles kernels");
  std::string cubin;
  JAX_TCGEMM_RETURN_IF_ERROR(compiler.compile(source, &cubin));
  return load(cubin, source.row, kernel);
}

void unload(const RunTimeKernel& kernel) {
  decltype(&cuLibraryUnload) unload_library = nullptr;
  if (find_driver_function("cuLibraryUnload", &unload_library).ok()) {
    unload_library(static_cast<CUlibrary>(kernel.library));
  }
}

void begin_to_compile(const KernelSource& source) {
  const Compiler compiler = current_compiler();
  if (compiler.begin != nullptr) compiler.begin(source);
}

}  // namespace jax_tcgemm
