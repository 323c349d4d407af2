// The custom call of a product: decodes it into a GemmProblem (operands: ffi/operands.cc), and
// turns a Status into an ffi::Error.

#include "ffi/handlers.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "common/saturating.h"
#include "common/status.h"
#include "dispatch/device.h"
#include "dispatch/dispatch.h"
#include "ffi/algorithm_names.h"
#include "ffi/attributes.h"
#include "ffi/element_types.h"
#include "ffi/factors.h"
#include "ffi/gemm.h"
#include "ffi/operands.h"
#include "ffi/stopwatch.h"
#include "gemm_params.h"

namespace jax_tcgemm {
namespace {

// Reads D, the further results (the pre-activation, or two for a gated product), and the workspace.
Status decode_results(const Call& call, GemmProblem* problem) {
  const GemmAttributes& at = call.attributes;
  GemmParams* params = &problem->params;
  const int64_t elements = mul_sat(mul_sat(params->batch, params->m), params->n);
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
  const std::string measured = is_measured(at.config) ? measured_config(ordinal) : std::string();
  problem.config = is_measured(at.config) ? measured : at.config;
  problem.beside_collectives = at.beside_collectives;
  JAX_TCGEMM_RETURN_IF_ERROR(decode_shape(at, &problem.params));
  JAX_TCGEMM_RETURN_IF_ERROR(decode_results(call, &problem));
  if (problem.params.batch == 0 || problem.params.m == 0 || problem.params.n == 0) return Status();
  EpilogueParams& epilogue = problem.params.epilogue;
  JAX_TCGEMM_RETURN_IF_ERROR(decode_activation(at.activation, &epilogue.activation));
  epilogue.activation_parameters[0] = at.activation_p0;
  epilogue.activation_parameters[1] = at.activation_p1;
  JAX_TCGEMM_RETURN_IF_ERROR(decode_operands(call, &problem));
  const DeviceProperties* device = nullptr;
  JAX_TCGEMM_RETURN_IF_ERROR(get_device_properties(ordinal, &device));
  return run_gemm(problem, *device, stream);
}

// Reads the epilogue as far as a call's attributes tell. An operand that exists gets some address.
Status expect_epilogue(const GemmAttributes& at, ffi::RemainingRets& results,
                       EpilogueParams* epilogue) {
  static constexpr float kSomewhere alignas(16)[4] = {};
  const auto expect = [&](bool is_there, Strides strides, bool along_m, bool along_n,
                          Addend* addend) {
    if (!is_there) return;
    const size_t rank = at.batch_shape.size();
    if (strides.size() != rank + along_m + along_n) return;  // the execution will report it
    *addend = {kSomewhere, 0, 0, {}, epilogue->d_type, true};
    if (along_m) addend->stride_m = strides[rank];
    if (along_n) addend->stride_n = strides[strides.size() - 1];
    for (size_t i = 0; i < rank; ++i) addend->batch.stride[i] = strides[i];
  };
  // XLA may pass no results yet.
  if (auto d = results.get<ffi::AnyBuffer>(0); d.has_value()) {
    ffi::AnyBuffer buffer = **d;
    JAX_TCGEMM_RETURN_IF_ERROR(decode_real_type("D", buffer.element_type(), &epilogue->d_type));
  }
  epilogue->d_vectorizable = at.n % kVectorColumns == 0;
  epilogue->gated = at.gated;
  epilogue->alpha.value = at.alpha;
  epilogue->beta.value = at.beta;
  if (at.has_alpha) epilogue->alpha.data = kSomewhere;
  if (at.has_beta) epilogue->beta.data = kSomewhere;
  expect(at.has_c, at.c_strides, true, true, &epilogue->c);
  expect(at.has_c2, at.c_strides, true, true, &epilogue->c2);
  expect(at.has_bias, at.bias_strides, false, true, &epilogue->bias);
  expect(at.has_row_scale, at.row_scale_strides, true, false, &epilogue->row_scale);
  expect(at.has_column_scale, at.column_scale_strides, false, true, &epilogue->column_scale);
  if (at.has_aux) epilogue->aux = const_cast<float*>(kSomewhere);
  JAX_TCGEMM_RETURN_IF_ERROR(decode_role(at.c_role, &epilogue->role_of_c));
  return decode_activation(at.activation, &epilogue->activation);
}

// Compiles kernels that the build lacks side by side, until the first of them is needed. If the
// call has an error, its execution will report it.
ffi::Error instantiate_gemm(ffi::RemainingArgs, ffi::RemainingRets results,
                            GemmAttributes attributes) {
  static_cast<void>(begin_kernels(attributes, results));
  return ffi::Error::Success();
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

XLA_FFI_DEFINE_HANDLER(
    kInstantiateHandler, instantiate_gemm,
    ffi::Ffi::BindInstantiate().RemainingArgs().RemainingRets().Attrs<GemmAttributes>());

#define JAX_TCGEMM_STRING(x) #x
#define JAX_TCGEMM_VALUE(x) JAX_TCGEMM_STRING(x)

}  // namespace

Status begin_kernels(const GemmAttributes& at, ffi::RemainingRets& results) {
  const auto algorithm = algorithm_from_name(at.algorithm);
  if (is_measured(at.config)) return Status();
  const DeviceProperties* device = nullptr;
  JAX_TCGEMM_RETURN_IF_ERROR(current_device(&device));
  if (!algorithm.has_value() || device == nullptr) return Status();
  GemmProblem problem = {};
  problem.algorithm = *algorithm;
  problem.config = at.config;
  problem.padding_bytes = at.padding_bytes;
  if (at.has_workspace && results.size() > 0) {
    auto workspace = results.get<ffi::AnyBuffer>(results.size() - 1);
    if (workspace.has_value()) {
      problem.workspace_bytes = static_cast<int64_t>((*workspace)->size_bytes());
    }
  }
  JAX_TCGEMM_RETURN_IF_ERROR(decode_shape(at, &problem.params));
  if (problem.params.batch == 0 || problem.params.m == 0 || problem.params.n == 0) return Status();
  JAX_TCGEMM_RETURN_IF_ERROR(decode_layouts(at, &problem));
  problem.params.epilogue.d_type = arithmetic_of(*algorithm).output;
  JAX_TCGEMM_RETURN_IF_ERROR(expect_epilogue(at, results, &problem.params.epilogue));
  begin_gemm(problem, *device);
  return Status();
}

Target gemm_target() { return {"jax_tcgemm_gemm_v1", kGemmHandler, kInstantiateHandler}; }

const char* xla_ffi_api_version() {
  return JAX_TCGEMM_VALUE(XLA_FFI_API_MAJOR) "." JAX_TCGEMM_VALUE(XLA_FFI_API_MINOR);
}

}  // namespace jax_tcgemm
