// The custom call of a product whose epilogue is compiled at run time; see dispatch/compiled.h.
//
// Instantiate, once for each call of a program: compiles and loads the kernel.
// Execute: launches the kernel.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string_view>

#include "common/ceil_div.h"
#include "common/saturating.h"
#include "common/status.h"
#include "dispatch/compiled.h"
#include "dispatch/device.h"
#include "ffi/algorithm_names.h"
#include "ffi/attributes.h"
#include "ffi/compiled.h"
#include "ffi/compiled_operands.h"
#include "ffi/factors.h"
#include "ffi/handlers.h"
#include "ffi/operands.h"
#include "ffi/program_source.h"
#include "shared_limits.h"

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_tcgemm::CompiledAttributes,
                                      JAX_TCGEMM_COMPILED_MEMBERS);

namespace jax_tcgemm {
namespace {

// Returns the attributes in the form of products with built-in epilogues.
GemmAttributes gemm_attributes(const CompiledAttributes& at) {
  GemmAttributes gemm = {};
  gemm.m = at.m;
  gemm.n = at.n;
  gemm.k = at.k;
  gemm.b2_offset = at.b2_offset;
  gemm.batch_shape = at.batch_shape;
  gemm.a_strides = at.a_strides;
  gemm.b_strides = at.b_strides;
  gemm.has_b2 = at.has_b2;
  gemm.gated = at.gated;
  gemm.alpha = 1.f;
  gemm.c_role = "add";
  return gemm;
}

Status decode_problem(const CompiledAttributes& at, GemmProblem* problem) {
  const auto algorithm = algorithm_from_name(at.algorithm);
  JAX_TCGEMM_REQUIRE(algorithm.has_value(), "unknown algorithm '", at.algorithm, "'");
  problem->algorithm = *algorithm;
  problem->config = at.config;
  problem->grouped = at.has_groups ? Grouped::kM : Grouped::kNone;
  problem->params.epilogue.d_type = arithmetic_of(*algorithm).output;
  problem->params.epilogue.gated = at.gated;
  return decode_shape(gemm_attributes(at), &problem->params);
}

// Returns the number of results with a workspace, in which blocks add up parts of k, in place of a
// further result.
size_t results_with_workspace(const CompiledAttributes& at) {
  return at.result_elements.size() + 1;
}

Status decode_program(const CompiledAttributes& at, EpilogueProgram* program) {
  *program = {at.digest, at.source, at.warp_bytes};
  program->reduces = number_after(at.source, "kReductions = ") > 0;
  bool is_wide = program->reduces;
  KindReader reader(at.source, "kResult");
  ElementKind kind = {};
  for (int64_t i = number_after(at.source, "kResults = "); i > 0; --i) {
    JAX_TCGEMM_RETURN_IF_ERROR(reader.next(&kind));
    constexpr int64_t kGap = 16;  // bytes, between two rows: see CompiledPlan
    program->result_bytes += kReducedBlock * (kReducedBlock * kind.bytes + kGap);
    is_wide = is_wide || kind.bytes > 2;
  }
  // Sources of earlier versions do not say it.
  const bool is_hidden = at.source.find("kShowsSums = false") != std::string_view::npos;
  program->shows_sums = is_wide && !is_hidden;
  return Status();
}

EpilogueOperands epilogue_operands(const CompiledAttributes& at, int64_t matrices,
                                   bool has_workspace) {
  return {at.m,
          at.n,
          at.batch_shape,
          at.operand_strides,
          at.operand_vectors,
          at.result_elements,
          at.own_operands(),
          matrices,
          kReducedBlock,
          kReducedBlock,
          at.source,
          has_workspace};
}

// Reads the scales of one operand, (batch..., first, second).
Status decode_scales(const CompiledAttributes& at, ffi::RemainingArgs& operands, size_t index,
                     Strides strides, int64_t first, int64_t second, const float** data,
                     int64_t* stride_first, int64_t* stride_second, BatchStrides* batch) {
  const size_t batch_rank = at.batch_shape.size();
  const auto buffer = operands.get<ffi::AnyBuffer>(index);
  JAX_TCGEMM_REQUIRE(
      buffer.has_value() && buffer->element_type() == ffi::F32 && strides.size() == batch_rank + 2,
      "operand ", index, " has no scales in float32 with ", strides.size(), " strides");
  *stride_first = strides[batch_rank];
  *stride_second = strides[batch_rank + 1];
  AddressedSpan addressed;
  for (size_t i = 0; i < batch_rank + 2; ++i) {
    JAX_TCGEMM_REQUIRE(is_stride(strides[i]), "scales have stride ", strides[i]);
    const int64_t extent = i < batch_rank ? at.batch_shape[i] : i == batch_rank ? first : second;
    addressed.add_dimension(extent, strides[i]);
    if (i < batch_rank) batch->stride[i] = strides[i];
  }
  const auto available = static_cast<int64_t>(buffer->element_count());
  JAX_TCGEMM_REQUIRE(addressed.elements() <= available, "scales are addressed up to element ",
                     addressed.elements(), " but there are ", available);
  *data = static_cast<const float*>(buffer->untyped_data());
  return Status();
}

Status decode_block_scales(const CompiledAttributes& at, ffi::RemainingArgs& operands,
                           BlockScales* scales) {
  const int64_t k_blocks = ceil_div(at.k, kScaleBlock);
  const size_t index = at.own_operands() - 2;
  JAX_TCGEMM_RETURN_IF_ERROR(decode_scales(at, operands, index, at.a_scale_strides, at.m, k_blocks,
                                           &scales->a, &scales->a_stride_m, &scales->a_stride_k,
                                           &scales->a_batch));
  return decode_scales(at, operands, index + 1, at.b_scale_strides, k_blocks,
                       ceil_div(at.n, kScaleBlock), &scales->b, &scales->b_stride_k,
                       &scales->b_stride_n, &scales->b_batch);
}

Status decode_groups(ffi::RemainingArgs& operands, GemmParams* params) {
  const auto sizes = operands.get<ffi::AnyBuffer>(2);
  JAX_TCGEMM_REQUIRE(params->batch_rank == 1, "groups of ", params->batch_rank,
                     " batch dimensions");
  JAX_TCGEMM_REQUIRE(sizes.has_value() && sizes->element_type() == ffi::S32 &&
                         static_cast<int64_t>(sizes->element_count()) == params->batch,
                     "no sizes of ", params->batch, " groups");
  params->group_sizes = static_cast<const int32_t*>(sizes->untyped_data());
  return Status();
}

bool is_empty(const GemmProblem& problem) {
  return problem.params.batch == 0 || problem.params.m == 0 || problem.params.n == 0;
}

Status decode_and_run(const CompiledAttributes& at, ffi::RemainingArgs& operands,
                      ffi::RemainingRets& results, int32_t ordinal, cudaStream_t stream) {
  CompiledCall call = {};
  JAX_TCGEMM_RETURN_IF_ERROR(decode_problem(at, &call.problem));
  if (is_empty(call.problem)) return Status();
  JAX_TCGEMM_RETURN_IF_ERROR(decode_compiled(at, operands, results, &call));
  const DeviceProperties* device = nullptr;
  JAX_TCGEMM_RETURN_IF_ERROR(get_device_properties(ordinal, &device));
  return run_compiled(call.problem, call.params, call.program, *device, stream);
}

ffi::Error compiled_gemm(cudaStream_t stream, int32_t ordinal, ffi::RemainingArgs operands,
                         ffi::RemainingRets results, CompiledAttributes attributes) {
  return as_error(decode_and_run(attributes, operands, results, ordinal, stream));
}

// XLA may pass buffers without addresses, or none.
ffi::Error instantiate_compiled_gemm(ffi::RemainingArgs, ffi::RemainingRets results,
                                     CompiledAttributes attributes) {
  int64_t workspace_bytes = 0;
  if (results.size() == results_with_workspace(attributes)) {
    auto workspace = results.get<ffi::AnyBuffer>(results.size() - 1);
    if (workspace.has_value()) workspace_bytes = static_cast<int64_t>((*workspace)->size_bytes());
  }
  return as_error(prepare_rows(attributes, attributes.m, workspace_bytes));
}

// Capturable into a CUDA graph: the handler only enqueues a kernel.
XLA_FFI_DEFINE_HANDLER(kCompiledGemmHandler, compiled_gemm,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs<CompiledAttributes>(),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(
    kInstantiateHandler, instantiate_compiled_gemm,
    ffi::Ffi::BindInstantiate().RemainingArgs().RemainingRets().Attrs<CompiledAttributes>());

}  // namespace

Status decode_compiled(const CompiledAttributes& at, ffi::RemainingArgs& operands,
                       ffi::RemainingRets& results, CompiledCall* call) {
  GemmProblem& problem = call->problem;
  problem = {};
  JAX_TCGEMM_RETURN_IF_ERROR(decode_problem(at, &problem));
  const GemmAttributes gemm = gemm_attributes(at);
  JAX_TCGEMM_RETURN_IF_ERROR(decode_operands({gemm, operands, results}, &problem));
  if (at.has_groups) JAX_TCGEMM_RETURN_IF_ERROR(decode_groups(operands, &problem.params));
  JAX_TCGEMM_REQUIRE(is_true_after(at.source, "kBlockScales = ") == at.has_scales(),
                     "scales by blocks, not as the source says");
  CompiledParams& params = call->params;
  params = {problem.params, {}, {}, {}};
  const bool has_workspace = results.size() == results_with_workspace(at);
  if (has_workspace) {
    auto workspace = results.get<ffi::AnyBuffer>(results.size() - 1);
    JAX_TCGEMM_REQUIRE(workspace.has_value(), "the workspace is missing");
    problem.workspace = (*workspace)->untyped_data();
    JAX_TCGEMM_REQUIRE(reinterpret_cast<uintptr_t>(problem.workspace) % 16 == 0,
                       "the workspace lies at ", problem.workspace);
    problem.workspace_bytes = static_cast<int64_t>((*workspace)->size_bytes());
  }
  if (at.has_scales()) {
    JAX_TCGEMM_REQUIRE(!at.has_b2 && !at.gated && !at.has_groups,
                       "scales by blocks of two weights or of groups");
    JAX_TCGEMM_RETURN_IF_ERROR(decode_block_scales(at, operands, &params.scales));
  }
  // Groups divide the rows of one matrix.
  const int64_t matrices = at.has_groups ? 1 : params.batch;
  JAX_TCGEMM_RETURN_IF_ERROR(
      decode_epilogue(epilogue_operands(at, matrices, has_workspace), operands, results, &params));
  return decode_program(at, &call->program);
}

Status prepare_rows(const CompiledAttributes& at, int64_t rows, int64_t workspace_bytes) {
  const DeviceProperties* device = nullptr;
  JAX_TCGEMM_RETURN_IF_ERROR(current_device(&device));
  if (device == nullptr) return Status();
  CompiledAttributes part = at;
  part.m = rows;
  GemmProblem problem = {};
  JAX_TCGEMM_RETURN_IF_ERROR(decode_problem(part, &problem));
  if (is_empty(problem)) return Status();
  problem.workspace_bytes = workspace_bytes;
  JAX_TCGEMM_RETURN_IF_ERROR(decode_layouts(gemm_attributes(part), &problem));
  EpilogueProgram program;
  JAX_TCGEMM_RETURN_IF_ERROR(decode_program(part, &program));
  return prepare_compiled(problem, program, *device);
}

Target compiled_gemm_target() {
  return {"jax_tcgemm_compiled_gemm_v4", kCompiledGemmHandler, kInstantiateHandler};
}

}  // namespace jax_tcgemm
