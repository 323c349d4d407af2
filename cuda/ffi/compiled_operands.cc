#include "ffi/compiled_operands.h"

#include <cstdint>

namespace jax_tcgemm {
namespace {

bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

// Operand i of the epilogue.
Status decode_operand(const EpilogueOperands& at, ffi::RemainingArgs& operands, size_t i,
                      CompiledOperand* operand) {
  const size_t batch_rank = at.batch_shape.size();
  const auto buffer = operands.get<ffi::AnyBuffer>(i + at.before);
  JAX_TCGEMM_REQUIRE(buffer.has_value(), "operand ", i, " of the epilogue is missing");
  int64_t last = 0;
  for (size_t axis = 0; axis < batch_rank + 2; ++axis) {
    const int64_t stride = at.operand_strides[i * (batch_rank + 2) + axis];
    const int64_t extent = axis < batch_rank    ? at.batch_shape[axis]
                           : axis == batch_rank ? at.m
                                                : at.n;
    JAX_TCGEMM_REQUIRE(stride >= 0, "operand ", i, " of the epilogue has stride ", stride);
    last += (extent - 1) * stride;
    if (axis < batch_rank) operand->batch.stride[axis] = stride;
    if (axis == batch_rank) operand->stride_m = stride;
    if (axis == batch_rank + 1) operand->stride_n = stride;
  }
  const auto available = static_cast<int64_t>(buffer->element_count());
  JAX_TCGEMM_REQUIRE(last < available, "operand ", i,
                     " of the epilogue is addressed up to element ", last, " but has ", available);
  operand->data = buffer->untyped_data();
  JAX_TCGEMM_REQUIRE(at.operand_vectors[i] == 0 || is_aligned(operand->data), "operand ", i,
                     " of the epilogue lies at ", operand->data, ", no multiple of 16 bytes");
  return Status();
}

}  // namespace

Status decode_epilogue(const EpilogueOperands& at, ffi::RemainingArgs& operands,
                       ffi::RemainingRets& results, CompiledParams* params) {
  const size_t count = at.operand_vectors.size();
  JAX_TCGEMM_REQUIRE(count <= size_t{kMaxCompiledOperands} &&
                         at.operand_strides.size() == count * (at.batch_shape.size() + 2),
                     count, " operands of the epilogue with ", at.operand_strides.size(),
                     " strides; at most ", kMaxCompiledOperands);
  for (size_t i = 0; i < count; ++i) {
    JAX_TCGEMM_RETURN_IF_ERROR(decode_operand(at, operands, i, &params->operands[i]));
  }
  JAX_TCGEMM_REQUIRE(
      results.size() == at.result_elements.size() && results.size() <= size_t{kMaxCompiledResults},
      results.size(), " results, at most ", kMaxCompiledResults);
  for (size_t i = 0; i < results.size(); ++i) {
    auto result = results.get<ffi::AnyBuffer>(i);
    JAX_TCGEMM_REQUIRE(result.has_value(), "result ", i, " is missing");
    ffi::AnyBuffer buffer = **result;
    JAX_TCGEMM_REQUIRE(static_cast<int64_t>(buffer.element_count()) == at.result_elements[i],
                       "result ", i, " has ", buffer.element_count(), " elements, not ",
                       at.result_elements[i]);
    params->results[i] = buffer.untyped_data();
    JAX_TCGEMM_REQUIRE(is_aligned(params->results[i]), "result ", i, " lies at ",
                       params->results[i], ", no multiple of 16 bytes");
  }
  return Status();
}

}  // namespace jax_tcgemm
