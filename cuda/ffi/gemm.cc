// The way from XLA to the kernels: decodes a custom call into a GemmProblem (operands:
// ffi/operands.cc), and turns a Status into an ffi::Error.

#include "ffi/handlers.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string_view>

#include "common/status.h"
#include "dispatch/device.h"
#include "dispatch/dispatch.h"
#include "ffi/algorithm_names.h"
#include "ffi/attributes.h"
#include "ffi/element_types.h"
#include "ffi/operands.h"
#include "gemm_params.h"

namespace jax_tcgemm {
namespace {

// D, the further results (the pre-activation; of a gated product two), and the workspace.
Status decode_results(const Call& call, GemmProblem* problem) {
  const GemmAttributes& at = call.attributes;
  GemmParams* params = &problem->params;
  const int64_t elements = int64_t{params->batch} * params->m * params->n;
  const size_t matrices = !at.has_aux ? 1 : at.gated ? 3 : 2;
  const size_t count = matrices + (at.has_workspace ? 1 : 0);
  JAX_TCGEMM_REQUIRE(call.results.size() == count, call.results.size(), " results, ", count,
                     " expected");
  if (at.has_workspace) {
    auto workspace = call.results.get<ffi::AnyBuffer>(matrices);
    JAX_TCGEMM_REQUIRE(workspace.has_value(), "the workspace is missing");
    problem->workspace = (*workspace)->untyped_data();
    problem->workspace_bytes = static_cast<int64_t>((*workspace)->size_bytes());
    JAX_TCGEMM_REQUIRE(0 <= at.padding_bytes && at.padding_bytes <= problem->workspace_bytes,
                       at.padding_bytes, " bytes of padding in a workspace of ",
                       problem->workspace_bytes);
    problem->padding_bytes = at.padding_bytes;
  }
  EpilogueParams& epilogue = params->epilogue;
  for (size_t i = 0; i < matrices; ++i) {
    auto result = call.results.get<ffi::AnyBuffer>(i);
    JAX_TCGEMM_REQUIRE(result.has_value(), "result ", i, " is missing");
    ffi::AnyBuffer buffer = **result;
    JAX_TCGEMM_REQUIRE(real_count(buffer) == elements, "result ", i, " has ", real_count(buffer),
                       " elements, the problem ", elements);
    ElementType type;
    JAX_TCGEMM_RETURN_IF_ERROR(decode_real_type("D", buffer.element_type(), &type));
    if (i == 0) epilogue.d_type = type;
    JAX_TCGEMM_REQUIRE(type == epilogue.d_type, "the results differ in element type");
    void** const pointers[] = {&epilogue.d, &epilogue.aux, &epilogue.aux2};
    *pointers[i] = buffer.untyped_data();
  }
  const uint64_t vector_bytes = kVectorColumns * element_bytes(epilogue.d_type);
  epilogue.d_vectorizable = params->n % kVectorColumns == 0 &&
                            reinterpret_cast<uintptr_t>(epilogue.d) % vector_bytes == 0 &&
                            reinterpret_cast<uintptr_t>(epilogue.aux) % vector_bytes == 0;
  return Status();
}

Status decode_and_run(const Call& call, int32_t ordinal, cudaStream_t stream) {
  const GemmAttributes& at = call.attributes;
  GemmProblem problem = {};
  problem.planes = plane_product_from_name(at.algorithm);
  const auto algorithm = problem.planes == nullptr ? algorithm_from_name(at.algorithm)
                                                   : std::optional(problem.planes->factors);
  JAX_TCGEMM_REQUIRE(algorithm.has_value(), "unknown algorithm '", at.algorithm, "'");
  problem.algorithm = *algorithm;
  problem.config = at.config;
  problem.beside_collectives = at.beside_collectives;
  JAX_TCGEMM_RETURN_IF_ERROR(decode_shape(at, &problem.params));
  JAX_TCGEMM_RETURN_IF_ERROR(decode_results(call, &problem));
  EpilogueParams& epilogue = problem.params.epilogue;
  JAX_TCGEMM_RETURN_IF_ERROR(decode_activation(at.activation, &epilogue.activation));
  epilogue.activation_parameters[0] = at.activation_p0;
  epilogue.activation_parameters[1] = at.activation_p1;
  JAX_TCGEMM_RETURN_IF_ERROR(decode_operands(call, &problem));
  if (problem.params.batch == 0 || problem.params.m == 0 || problem.params.n == 0) return Status();
  const DeviceProperties* device = nullptr;
  JAX_TCGEMM_RETURN_IF_ERROR(get_device_properties(ordinal, &device));
  return run_gemm(problem, *device, stream);
}

ffi::Error gemm(cudaStream_t stream, int32_t ordinal, ffi::RemainingArgs operands,
                ffi::RemainingRets results, GemmAttributes attributes) {
  return as_error(decode_and_run({attributes, operands, results}, ordinal, stream));
}

// Capturable into a CUDA graph: the handler only enqueues kernels.
XLA_FFI_DEFINE_HANDLER(kGemmHandler, gemm,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs<GemmAttributes>(),
                       {ffi::Traits::kCmdBufferCompatible});

#define JAX_TCGEMM_STRING(x) #x
#define JAX_TCGEMM_VALUE(x) JAX_TCGEMM_STRING(x)

}  // namespace

void* gemm_handler() { return reinterpret_cast<void*>(+kGemmHandler); }

const char* xla_ffi_api_version() {
  return JAX_TCGEMM_VALUE(XLA_FFI_API_MAJOR) "." JAX_TCGEMM_VALUE(XLA_FFI_API_MINOR);
}

}  // namespace jax_tcgemm
