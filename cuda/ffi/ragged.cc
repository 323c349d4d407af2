// Decodes the custom call for ragged products into a GemmProblem; see dispatch/ragged.h.

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "common/saturating.h"
#include "common/status.h"
#include "dispatch/device.h"
#include "dispatch/dispatch.h"
#include "ffi/algorithm_names.h"
#include "ffi/attributes.h"
#include "ffi/element_types.h"
#include "ffi/handlers.h"
#include "ffi/operands.h"
#include "ffi/stopwatch.h"

namespace jax_tcgemm {

// Set by jax_tcgemm/lowering/ragged.py.
//   depth = false: lhs (m, k), rhs (groups, k, n), or (groups, n, k) with transpose_rhs, sizes
//                  (groups,), [bias (groups, n)] -> d (m, n), [the pre-activation]
//   depth = true:  lhs (k, m), rhs (k, n), sizes (groups,) -> d (groups, m, n)
struct RaggedAttributes {
  int64_t m, n, k, groups;
  bool depth, transpose_rhs, has_bias, has_aux;
  float activation_p0, activation_p1;
  std::string_view activation, algorithm, config;
};

}  // namespace jax_tcgemm

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    ::jax_tcgemm::RaggedAttributes, ::xla::ffi::StructMember<int64_t>("m"),
    ::xla::ffi::StructMember<int64_t>("n"), ::xla::ffi::StructMember<int64_t>("k"),
    ::xla::ffi::StructMember<int64_t>("groups"), ::xla::ffi::StructMember<bool>("depth"),
    ::xla::ffi::StructMember<bool>("transpose_rhs"), ::xla::ffi::StructMember<bool>("has_bias"),
    ::xla::ffi::StructMember<bool>("has_aux"), ::xla::ffi::StructMember<float>("activation_p0"),
    ::xla::ffi::StructMember<float>("activation_p1"),
    ::xla::ffi::StructMember<std::string_view>("activation"),
    ::xla::ffi::StructMember<std::string_view>("algorithm"),
    ::xla::ffi::StructMember<std::string_view>("config"));

namespace jax_tcgemm {
namespace {

bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

// The next buffer of a call, once it is known to have so many elements.
template <typename Buffers>
Status take(Buffers& buffers, size_t index, const char* name, int64_t elements, void** data,
            ffi::DataType* type) {
  auto found = buffers.template get<ffi::AnyBuffer>(index);
  JAX_TCGEMM_REQUIRE(found.has_value(), name, " is missing");
  ffi::AnyBuffer buffer = [&] {
    if constexpr (std::is_same_v<Buffers, ffi::RemainingRets>) {
      return **found;
    } else {
      return *found;
    }
  }();
  JAX_TCGEMM_REQUIRE(static_cast<int64_t>(buffer.element_count()) == elements, name, " has ",
                     buffer.element_count(), " elements, the problem ", elements);
  *data = buffer.untyped_data();
  *type = buffer.element_type();
  return Status();
}

// How the operands lie, at these addresses.
void lay_out_factors(const RaggedAttributes& at, const void* lhs, const void* rhs,
                     GemmProblem* problem) {
  GemmParams& p = problem->params;
  const int64_t matrices = at.depth ? 1 : at.groups;
  problem->major_a = at.depth ? Major::kMn : Major::kK;
  problem->major_b = at.depth || !at.transpose_rhs ? Major::kMn : Major::kK;
  p.a = {lhs, at.depth ? at.m : at.k, mul_sat(at.m, at.k), {}};
  p.b = {rhs,
         problem->major_b == Major::kMn ? at.n : at.k,
         mul_sat(mul_sat(matrices, at.k), at.n),
         {}};
  if (!at.depth) p.b.batch.stride[0] = at.k * at.n;
  problem->aligned_a = problem->strides_aligned_a = p.a.ld % 8 == 0 && is_aligned(lhs);
  problem->aligned_b = problem->strides_aligned_b = p.b.ld % 8 == 0 && is_aligned(rhs);
}

// Reads the operands of both kinds of product.
Status decode_factors(ffi::RemainingArgs& operands, const RaggedAttributes& at,
                      GemmProblem* problem) {
  void *lhs = nullptr, *rhs = nullptr, *sizes = nullptr;
  ffi::DataType lhs_type, rhs_type, sizes_type;
  const int64_t matrices = at.depth ? 1 : at.groups;
  JAX_TCGEMM_RETURN_IF_ERROR(take(operands, 0, "lhs", mul_sat(at.m, at.k), &lhs, &lhs_type));
  JAX_TCGEMM_RETURN_IF_ERROR(
      take(operands, 1, "rhs", mul_sat(mul_sat(matrices, at.k), at.n), &rhs, &rhs_type));
  JAX_TCGEMM_RETURN_IF_ERROR(take(operands, 2, "group_sizes", at.groups, &sizes, &sizes_type));
  const Arithmetic arithmetic = arithmetic_of(problem->algorithm);
  ElementType a, b;
  JAX_TCGEMM_RETURN_IF_ERROR(decode_type("lhs", lhs_type, &a));
  JAX_TCGEMM_RETURN_IF_ERROR(decode_type("rhs", rhs_type, &b));
  JAX_TCGEMM_REQUIRE(a == arithmetic.a && b == arithmetic.b && sizes_type == ffi::S32,
                     "element types of lhs, rhs and group_sizes are ", static_cast<int>(lhs_type),
                     ", ", static_cast<int>(rhs_type), " and ", static_cast<int>(sizes_type));
  problem->params.group_sizes = static_cast<const int32_t*>(sizes);
  lay_out_factors(at, lhs, rhs, problem);
  return Status();
}

Status decode_epilogue(ffi::RemainingArgs& operands, ffi::RemainingRets& results,
                       const RaggedAttributes& at, Algorithm algorithm, EpilogueParams* epilogue) {
  const int64_t elements = mul_sat(mul_sat(at.depth ? at.groups : 1, at.m), at.n);
  ffi::DataType type, other;
  JAX_TCGEMM_RETURN_IF_ERROR(take(results, 0, "d", elements, &epilogue->d, &type));
  JAX_TCGEMM_RETURN_IF_ERROR(decode_type("D", type, &epilogue->d_type));
  JAX_TCGEMM_REQUIRE(is_output(epilogue->d_type, algorithm), "element type of D is ",
                     static_cast<int>(type));
  if (at.has_aux) {
    JAX_TCGEMM_RETURN_IF_ERROR(
        take(results, 1, "the pre-activation", elements, &epilogue->aux, &other));
    JAX_TCGEMM_REQUIRE(type == other, "the results differ in element type");
  }
  epilogue->alpha.value = 1.f;
  epilogue->activation_parameters[0] = at.activation_p0;
  epilogue->activation_parameters[1] = at.activation_p1;
  JAX_TCGEMM_RETURN_IF_ERROR(decode_activation(at.activation, &epilogue->activation));
  if (!at.has_bias) return Status();
  void* bias = nullptr;
  JAX_TCGEMM_RETURN_IF_ERROR(take(operands, 3, "bias", mul_sat(at.groups, at.n), &bias, &other));
  JAX_TCGEMM_RETURN_IF_ERROR(decode_type("the bias", other, &epilogue->bias.type));
  JAX_TCGEMM_REQUIRE(is_output(epilogue->bias.type, algorithm), "element type of the bias is ",
                     static_cast<int>(other));
  epilogue->bias.data = bias;
  epilogue->bias.stride_n = 1;
  epilogue->bias.batch.stride[0] = at.n;
  return Status();
}

Status decode_shape(const RaggedAttributes& at, GemmProblem* problem) {
  for (const int64_t extent : {at.m, at.n, at.k, at.groups}) {
    JAX_TCGEMM_REQUIRE(0 < extent && extent <= kMaxExtent, "m=", at.m, " n=", at.n, " k=", at.k,
                       " groups=", at.groups);
  }
  const auto algorithm = algorithm_from_name(at.algorithm);
  JAX_TCGEMM_REQUIRE(algorithm.has_value() && element_bytes(*algorithm) == 2,
                     "no ragged kernel for '", at.algorithm, "'");
  JAX_TCGEMM_REQUIRE(!at.depth || !(at.has_bias || at.has_aux || !at.activation.empty()),
                     "groups of k have no epilogue");
  problem->algorithm = *algorithm;
  problem->config = at.config;
  problem->grouped = at.depth ? Grouped::kK : Grouped::kM;
  GemmParams& p = problem->params;
  p.m = static_cast<int32_t>(at.m);
  p.n = static_cast<int32_t>(at.n);
  p.k = static_cast<int32_t>(at.k);
  p.batch = p.batch_shape[0] = static_cast<int32_t>(at.groups);
  p.batch_rank = 1;
  return Status();
}

Status decode_and_run(ffi::RemainingArgs& operands, ffi::RemainingRets& results,
                      const RaggedAttributes& at, int32_t ordinal, cudaStream_t stream) {
  GemmProblem problem = {};
  JAX_TCGEMM_RETURN_IF_ERROR(decode_shape(at, &problem));
  const std::string measured = is_measured(at.config) ? measured_config(ordinal) : std::string();
  if (is_measured(at.config)) problem.config = measured;
  JAX_TCGEMM_RETURN_IF_ERROR(decode_factors(operands, at, &problem));
  JAX_TCGEMM_RETURN_IF_ERROR(
      decode_epilogue(operands, results, at, problem.algorithm, &problem.params.epilogue));
  const DeviceProperties* device = nullptr;
  JAX_TCGEMM_RETURN_IF_ERROR(get_device_properties(ordinal, &device));
  return run_gemm(problem, *device, stream);
}

// Begins to compile the kernel for the process's current GPU, like begin_kernels of gemm.cc.
Status decode_and_begin(const RaggedAttributes& at, ffi::RemainingRets& results) {
  if (is_measured(at.config)) return Status();
  const DeviceProperties* device = nullptr;
  JAX_TCGEMM_RETURN_IF_ERROR(current_device(&device));
  if (device == nullptr) return Status();
  GemmProblem problem = {};
  JAX_TCGEMM_RETURN_IF_ERROR(decode_shape(at, &problem));
  lay_out_factors(at, nullptr, nullptr, &problem);
  static constexpr float kSomewhere alignas(16)[4] = {};
  EpilogueParams& epilogue = problem.params.epilogue;
  epilogue.d_type = arithmetic_of(problem.algorithm).output;
  if (auto d = results.get<ffi::AnyBuffer>(0); d.has_value()) {
    ffi::AnyBuffer buffer = **d;
    JAX_TCGEMM_RETURN_IF_ERROR(decode_type("D", buffer.element_type(), &epilogue.d_type));
  }
  epilogue.alpha.value = 1.f;
  if (at.has_bias) epilogue.bias.data = kSomewhere;
  if (at.has_aux) epilogue.aux = const_cast<float*>(kSomewhere);
  JAX_TCGEMM_RETURN_IF_ERROR(decode_activation(at.activation, &epilogue.activation));
  begin_gemm(problem, *device);
  return Status();
}

ffi::Error instantiate_ragged_dot(ffi::RemainingArgs, ffi::RemainingRets results,
                                  RaggedAttributes attributes) {
  static_cast<void>(decode_and_begin(attributes, results));
  return ffi::Error::Success();
}

ffi::Error ragged_dot(cudaStream_t stream, int32_t ordinal, ffi::RemainingArgs operands,
                      ffi::RemainingRets results, RaggedAttributes attributes) {
  return as_error(decode_and_run(operands, results, attributes, ordinal, stream));
}

// Capturable into a CUDA graph: the handler only enqueues kernels.
XLA_FFI_DEFINE_HANDLER(kRaggedDotHandler, ragged_dot,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs<RaggedAttributes>(),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(
    kInstantiateHandler, instantiate_ragged_dot,
    ffi::Ffi::BindInstantiate().RemainingArgs().RemainingRets().Attrs<RaggedAttributes>());

}  // namespace

Target ragged_dot_target() {
  return {"jax_tcgemm_ragged_dot_v1", kRaggedDotHandler, kInstantiateHandler};
}

}  // namespace jax_tcgemm
