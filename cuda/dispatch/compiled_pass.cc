#include "dispatch/compiled_pass.h"

#include <limits>
#include <map>
#include <mutex>
#include <string>

#include "common/ceil_div.h"
#include "common/saturating.h"

namespace jax_tcgemm {
namespace {

// In place of a row's name; as PASS in jax_tcgemm/epilogue/source.py.
constexpr const char* kPass = "pass";

struct Loaded {
  std::mutex mutex;
  std::map<ByProgram::Owned, RunTimeKernel, ByProgram> kernels;  // they stay where they are
};

Loaded& loaded() {
  static Loaded* const loaded = new Loaded;  // outlives whatever runs at exit
  return *loaded;
}

const RunTimeKernel* find(const EpilogueProgram& program) {
  const std::lock_guard<std::mutex> lock(loaded().mutex);
  const auto found = loaded().kernels.find(program);
  return found == loaded().kernels.end() ? nullptr : &found->second;
}

Status find_or_make(const EpilogueProgram& program, const RunTimeKernel** kernel) {
  *kernel = find(program);
  if (*kernel != nullptr) return Status();
  RunTimeKernel fresh = {};
  JAX_TCGEMM_RETURN_IF_ERROR(make_kernel({program.source, kPass, ""}, &fresh));
  const std::lock_guard<std::mutex> lock(loaded().mutex);
  // Of two threads that made it, the first one's stays.
  *kernel = &loaded().kernels.emplace(ByProgram::view(program), fresh).first->second;
  return Status();
}

}  // namespace

Status prepare_pass(const EpilogueProgram& program) {
  const RunTimeKernel* kernel = nullptr;
  return find_or_make(program, &kernel);
}

Status run_pass(const CompiledParams& params, const EpilogueProgram& program, cudaStream_t stream) {
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  JAX_TCGEMM_CUDA_CHECK(cudaStreamIsCapturing(stream, &capturing), "asking for a capture");
  const RunTimeKernel* kernel = find(program);
  JAX_TCGEMM_REQUIRE(kernel != nullptr || capturing == cudaStreamCaptureStatusNone,
                     "no kernel of this pass is loaded while a graph is captured");
  if (kernel == nullptr) JAX_TCGEMM_RETURN_IF_ERROR(find_or_make(program, &kernel));
  const int64_t blocks = mul_sat(mul_sat(params.batch, ceil_div(params.m, kPassRows)),
                                 ceil_div(params.n, kPassColumns));
  JAX_TCGEMM_REQUIRE(blocks <= std::numeric_limits<int32_t>::max(), blocks, " blocks");
  cudaLaunchConfig_t launch = {};
  launch.gridDim = dim3(static_cast<unsigned>(blocks));
  launch.blockDim = dim3(kPassThreads);
  launch.stream = stream;
  void* arguments[] = {const_cast<CompiledParams*>(&params)};
  JAX_TCGEMM_CUDA_CHECK(cudaLaunchKernelExC(&launch, kernel->handle.function, arguments),
                        "launching a compiled pass for m=", params.m, " n=", params.n);
  return Status();
}

}  // namespace jax_tcgemm
