// The custom call of a product with a compiled epilogue, whose rows of A are gathered beside it:
// see overlap/overlapped.h. The epilogue does not depend on the row of an element, and reduces
// nothing.

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string_view>

#include "common/status.h"
#include "dispatch/compiled.h"
#include "dispatch/device.h"
#include "ffi/attributes.h"
#include "ffi/compiled.h"
#include "ffi/handlers.h"
#include "ffi/operands.h"
#include "ffi/peers.h"
#include "ffi/program_source.h"

namespace jax_tcgemm {

// Set by jax_tcgemm/lowering/overlapped_function.py. `compiled` describes the product of all rows.
// The operands are its, then the rows of this device, then the number of the device in its program.
struct OverlappedFunctionAttributes {
  CompiledAttributes compiled;
  int64_t call, group_size;
  Strides devices;

  PeersAttributes peers() const { return {call, group_size, devices}; }
};

}  // namespace jax_tcgemm

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_tcgemm::OverlappedFunctionAttributes,
                                      JAX_TCGEMM_COMPILED_MEMBERS,
                                      ::xla::ffi::StructMember<int64_t>("call"),
                                      ::xla::ffi::StructMember<int64_t>("group_size"),
                                      ::xla::ffi::StructMember<::jax_tcgemm::Strides>("devices"));

namespace jax_tcgemm {
namespace {

constexpr int kSignature = 7;  // no kind of the other overlapped call

Status check_function(const CompiledAttributes& at) {
  JAX_TCGEMM_REQUIRE(at.batch_shape.size() == 0 && !at.has_groups && !at.has_scales() &&
                         number_after(at.source, "kReductions = ") == 0,
                     "a function of matrices, groups, scales or rows");
  JAX_TCGEMM_REQUIRE(at.m > 0 && at.n > 0 && at.k > 0, "m=", at.m, " n=", at.n, " k=", at.k);
  return Status();
}

// Returns the call for the rows of a rank.
CompiledCall part_of_call(const CompiledCall& whole, const CompiledAttributes& at,
                          ffi::RemainingArgs& operands, ffi::RemainingRets& results, int rank,
                          int count, const void* a) {
  CompiledCall part = whole;
  part.problem = part_of_rows(whole.problem, rank, count, a);
  static_cast<GemmParams&>(part.params) = part.problem.params;
  const int64_t rows = int64_t{rank} * part.problem.params.m;
  for (size_t i = 0; i < at.operand_vectors.size(); ++i) {
    const auto buffer = operands.get<ffi::AnyBuffer>(i + at.own_operands());
    const auto bytes = static_cast<int64_t>(ffi::ByteWidth(buffer->element_type()));
    CompiledOperand& operand = part.params.operands[i];
    operand.data = static_cast<const char*>(operand.data) + rows * operand.stride_m * bytes;
  }
  for (size_t i = 0; i < results.size(); ++i) {
    auto result = results.get<ffi::AnyBuffer>(i);
    const auto bytes = static_cast<int64_t>(ffi::ByteWidth((*result)->element_type()));
    part.params.results[i] = static_cast<char*>(part.params.results[i]) + rows * at.n * bytes;
  }
  return part;
}

Status decode_and_run(const OverlappedFunctionAttributes& at, ffi::RemainingArgs& operands,
                      ffi::RemainingRets& results, int64_t run, int32_t ordinal,
                      cudaStream_t stream) {
  JAX_TCGEMM_RETURN_IF_ERROR(check_uncaptured(stream));
  const CompiledAttributes& compiled = at.compiled;
  JAX_TCGEMM_RETURN_IF_ERROR(check_function(compiled));
  JAX_TCGEMM_REQUIRE(results.size() == compiled.result_elements.size(), results.size(), " results");
  const int64_t signature = signature_of(compiled.m, compiled.n, compiled.k, kSignature);
  Peers peers;
  JAX_TCGEMM_RETURN_IF_ERROR(
      decode_peers(at.peers(), operands, signature, run, ordinal, stream, &peers));
  CompiledCall whole = {};
  JAX_TCGEMM_RETURN_IF_ERROR(decode_compiled(compiled, operands, results, &whole));
  GatheredRows rows = {};
  const Strides a = compiled.a_strides;
  JAX_TCGEMM_RETURN_IF_ERROR(
      decode_rows(at.peers(), operands, 0, compiled.m, compiled.k, a[0], a[1], &rows));
  const DeviceProperties* device = nullptr;
  JAX_TCGEMM_RETURN_IF_ERROR(get_device_properties(ordinal, &device));
  const auto multiply = [&](const CompiledCall& call) {
    return run_compiled(call.problem, call.params, call.program, *device, stream);
  };
  GatheredProduct product;
  product.multiply = [&] { return multiply(whole); };
  product.multiply_part = [&](int rank, const void* a_of_rank) {
    return multiply(part_of_call(whole, compiled, operands, results, rank, peers.count, a_of_rank));
  };
  return run_gathered(product, rows, peers, *device, stream);
}

ffi::Error overlapped_function(cudaStream_t stream, int32_t ordinal, ffi::RunId run,
                               ffi::RemainingArgs operands, ffi::RemainingRets results,
                               OverlappedFunctionAttributes attributes) {
  return as_error(decode_and_run(attributes, operands, results, run.run_id, ordinal, stream));
}

// The first product of the rows runs in parts, the others do not.
Status prepare(const OverlappedFunctionAttributes& at) {
  JAX_TCGEMM_REQUIRE(at.group_size >= 2, "groups of ", at.group_size, " devices");
  count_executable(at.call);
  JAX_TCGEMM_RETURN_IF_ERROR(prepare_rows(at.compiled, at.compiled.m / at.group_size));
  return prepare_rows(at.compiled, at.compiled.m);
}

ffi::Error instantiate_overlapped_function(ffi::RemainingArgs, ffi::RemainingRets,
                                           OverlappedFunctionAttributes attributes) {
  return as_error(prepare(attributes));
}

XLA_FFI_DEFINE_HANDLER(kOverlappedFunctionHandler, overlapped_function,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Ctx<ffi::RunId>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs<OverlappedFunctionAttributes>());

XLA_FFI_DEFINE_HANDLER(kInstantiateHandler, instantiate_overlapped_function,
                       ffi::Ffi::BindInstantiate()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs<OverlappedFunctionAttributes>());

}  // namespace

Target overlapped_function_target() {
  return {"jax_tcgemm_overlapped_function_v1", kOverlappedFunctionHandler, kInstantiateHandler};
}

}  // namespace jax_tcgemm
