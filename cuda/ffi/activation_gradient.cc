// Decodes the custom call for the gradient of an activation into an ActivationGradient.

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string_view>

#include "common/status.h"
#include "ffi/attributes.h"
#include "ffi/element_types.h"
#include "ffi/handlers.h"
#include "ffi/operands.h"
#include "passes/activation_gradient.h"

namespace jax_tcgemm {

// Set by jax_tcgemm/primitives/activation_gradient.py: cotangent (..., n), z (..., n) -> d (...,
// n), or also the sums (n,) and their workspace (parts, n).
struct ActivationGradientAttributes {
  int64_t n, parts;
  float activation_p0, activation_p1;
  std::string_view activation;
};

}  // namespace jax_tcgemm

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_tcgemm::ActivationGradientAttributes,
                                      ::xla::ffi::StructMember<int64_t>("n"),
                                      ::xla::ffi::StructMember<int64_t>("parts"),
                                      ::xla::ffi::StructMember<float>("activation_p0"),
                                      ::xla::ffi::StructMember<float>("activation_p1"),
                                      ::xla::ffi::StructMember<std::string_view>("activation"));

namespace jax_tcgemm {
namespace {

bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

Status decode_sums(const ActivationGradientAttributes& at, ElementType type,
                   ffi::RemainingRets& results, ActivationGradient* problem) {
  if (results.size() == 1) return Status();
  auto sums = results.get<ffi::AnyBuffer>(1);
  auto workspace = results.get<ffi::AnyBuffer>(2);
  JAX_TCGEMM_REQUIRE(results.size() == 3 && sums.has_value() && workspace.has_value(),
                     results.size(), " results");
  ElementType& sums_type = problem->sums_type;
  JAX_TCGEMM_RETURN_IF_ERROR(decode_type("sums", (*sums)->element_type(), &sums_type));
  JAX_TCGEMM_REQUIRE(sums_type == type || sums_type == ElementType::kF32,
                     "element type of the sums is ", static_cast<int>(sums_type));
  JAX_TCGEMM_REQUIRE(static_cast<int64_t>((*sums)->element_count()) == at.n, "n=", at.n, ", ",
                     (*sums)->element_count(), " sums");
  JAX_TCGEMM_REQUIRE(static_cast<int64_t>((*workspace)->size_bytes()) == at.n * at.parts * 4,
                     "n=", at.n, " parts=", at.parts, ", a workspace of ",
                     (*workspace)->size_bytes());
  problem->sums = (*sums)->untyped_data();
  problem->partial_sums = static_cast<float*>((*workspace)->untyped_data());
  JAX_TCGEMM_REQUIRE(is_aligned(problem->sums) && is_aligned(problem->partial_sums), "sums at ",
                     problem->sums, ", workspace at ", problem->partial_sums);
  return Status();
}

Status decode_and_run(ffi::AnyBuffer cotangent, ffi::AnyBuffer z, ffi::RemainingRets& results,
                      const ActivationGradientAttributes& at, cudaStream_t stream) {
  auto d = results.get<ffi::AnyBuffer>(0);
  JAX_TCGEMM_REQUIRE(d.has_value(), "no result");
  ElementType type;
  JAX_TCGEMM_RETURN_IF_ERROR(decode_type("z", z.element_type(), &type));
  JAX_TCGEMM_REQUIRE(element_bytes(type) == 2, "element type of z is ", static_cast<int>(type));
  JAX_TCGEMM_REQUIRE(
      cotangent.element_type() == z.element_type() && (*d)->element_type() == z.element_type(),
      "the matrices differ in element type");
  const size_t elements = z.element_count();
  JAX_TCGEMM_REQUIRE(cotangent.element_count() == elements && (*d)->element_count() == elements,
                     "z has ", elements, " elements, the cotangent ", cotangent.element_count(),
                     ", the result ", (*d)->element_count());
  JAX_TCGEMM_REQUIRE(
      0 < at.n && at.n <= kMaxExtent && at.n % kGradientColumns == 0 && elements % at.n == 0,
      "n=", at.n, " of ", elements, " elements");
  constexpr int64_t kMostParts = 65535;  // the limit of a grid's second dimension
  JAX_TCGEMM_REQUIRE(0 < at.parts && at.parts <= kMostParts, "parts=", at.parts);
  ActivationGradient problem = {};
  problem.cotangent = cotangent.untyped_data();
  problem.z = z.untyped_data();
  problem.d = (*d)->untyped_data();
  JAX_TCGEMM_REQUIRE(
      is_aligned(problem.cotangent) && is_aligned(problem.z) && is_aligned(problem.d),
      "matrices at ", problem.cotangent, ", ", problem.z, " and ", problem.d);
  problem.rows = static_cast<int64_t>(elements) / at.n;
  problem.n = static_cast<int32_t>(at.n);
  problem.parts = static_cast<int32_t>(at.parts);
  problem.activation_parameters[0] = at.activation_p0;
  problem.activation_parameters[1] = at.activation_p1;
  JAX_TCGEMM_RETURN_IF_ERROR(decode_activation(at.activation, &problem.activation));
  JAX_TCGEMM_RETURN_IF_ERROR(decode_sums(at, type, results, &problem));
  JAX_TCGEMM_CUDA_CHECK(launch_activation_gradient(problem, type, stream), "rows=", problem.rows,
                        " n=", at.n, " parts=", at.parts);
  return Status();
}

ffi::Error activation_gradient(cudaStream_t stream, ffi::AnyBuffer cotangent, ffi::AnyBuffer z,
                               ffi::RemainingRets results,
                               ActivationGradientAttributes attributes) {
  return as_error(decode_and_run(cotangent, z, results, attributes, stream));
}

// Capturable into a CUDA graph: the handler only enqueues kernels.
XLA_FFI_DEFINE_HANDLER(kActivationGradientHandler, activation_gradient,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .RemainingRets()
                           .Attrs<ActivationGradientAttributes>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

void* activation_gradient_handler() { return reinterpret_cast<void*>(+kActivationGradientHandler); }

}  // namespace jax_tcgemm
