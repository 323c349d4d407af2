#include "ffi/compiled_operands.h"

#include <cstdint>

#include "common/ceil_div.h"
#include "common/saturating.h"
#include "ffi/program_source.h"

namespace jax_tcgemm {
namespace {

constexpr int64_t kVectorBytes = 16;

bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0; }

// Reads operand i of the epilogue.
Status decode_operand(const EpilogueOperands& at, ffi::RemainingArgs& operands, size_t i,
                      const ElementKind& kind, CompiledOperand* operand) {
  const size_t batch_rank = at.batch_shape.size();
  const auto buffer = operands.get<ffi::AnyBuffer>(i + at.before);
  JAX_TCGEMM_REQUIRE(buffer.has_value(), "operand ", i, " of the epilogue is missing");
  AddressedSpan addressed;
  for (size_t axis = 0; axis < batch_rank + 2; ++axis) {
    const int64_t stride = at.operand_strides[i * (batch_rank + 2) + axis];
    const int64_t extent = axis < batch_rank    ? at.batch_shape[axis]
                           : axis == batch_rank ? at.m
                                                : at.n;
    JAX_TCGEMM_REQUIRE(is_stride(stride), "operand ", i, " of the epilogue has stride ", stride);
    addressed.add_dimension(extent, stride);
    const int64_t step = axis == batch_rank + 1 ? extent : stride;
    JAX_TCGEMM_REQUIRE(!kind.is_vector || step * kind.bytes % kVectorBytes == 0, "operand ", i,
                       " of the epilogue, read by vectors, has step ", step);
    if (axis < batch_rank) operand->batch.stride[axis] = stride;
    if (axis == batch_rank) operand->stride_m = stride;
    if (axis == batch_rank + 1) operand->stride_n = stride;
  }
  const auto available = static_cast<int64_t>(buffer->element_count());
  JAX_TCGEMM_REQUIRE(addressed.elements() <= available, "operand ", i,
                     " of the epilogue is addressed up to element ", addressed.elements(),
                     " but has ", available);
  JAX_TCGEMM_REQUIRE(static_cast<int64_t>(ffi::ByteWidth(buffer->element_type())) == kind.bytes &&
                         (at.operand_vectors[i] != 0) == kind.is_vector &&
                         (!kind.is_vector || operand->stride_n == 1),
                     "operand ", i, " of the epilogue has element type ",
                     static_cast<int>(buffer->element_type()), " and stride ", operand->stride_n,
                     ", not as the source says");
  operand->data = buffer->untyped_data();
  JAX_TCGEMM_REQUIRE(!kind.is_vector || is_aligned(operand->data), "operand ", i,
                     " of the epilogue lies at ", operand->data, ", no multiple of 16 bytes");
  return Status();
}

// Counts the elements of the next reduction's result: each block of results contributes its own.
Status reduced_elements(const EpilogueOperands& at, ReductionReader* source, int64_t* elements) {
  bool along_m = false, along_n = false;
  JAX_TCGEMM_RETURN_IF_ERROR(source->next(&along_m, &along_n));
  const int64_t rows = along_m ? at.m : ceil_div(at.m, at.block_rows);
  const int64_t columns = along_n ? at.n : ceil_div(at.n, at.block_columns);
  *elements = mul_sat(mul_sat(at.matrices, rows), columns);
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
  JAX_TCGEMM_REQUIRE(number_after(at.source, "kOperands = ") == static_cast<int64_t>(count), count,
                     " operands, not as the source says");
  KindReader operand_kinds(at.source, "kOperand");
  for (size_t i = 0; i < count; ++i) {
    ElementKind kind;
    JAX_TCGEMM_RETURN_IF_ERROR(operand_kinds.next(&kind));
    JAX_TCGEMM_RETURN_IF_ERROR(decode_operand(at, operands, i, kind, &params->operands[i]));
  }
  const size_t count_of_results = at.result_elements.size();
  JAX_TCGEMM_REQUIRE(results.size() == count_of_results + (at.has_workspace ? 1 : 0) &&
                         count_of_results <= size_t{kMaxCompiledResults},
                     results.size(), " results, at most ", kMaxCompiledResults);
  const int64_t matrices = number_after(at.source, "kResults = ");
  const int64_t reductions = number_after(at.source, "kReductions = ");
  JAX_TCGEMM_REQUIRE(0 <= matrices && 0 <= reductions &&
                         matrices + reductions == static_cast<int64_t>(count_of_results),
                     count_of_results, " results, not as the source says");
  KindReader result_kinds(at.source, "kResult");
  ReductionReader reductions_of_source(at.source);
  for (size_t i = 0; i < count_of_results; ++i) {
    auto result = results.get<ffi::AnyBuffer>(i);
    JAX_TCGEMM_REQUIRE(result.has_value(), "result ", i, " is missing");
    ffi::AnyBuffer buffer = **result;
    JAX_TCGEMM_REQUIRE(static_cast<int64_t>(buffer.element_count()) == at.result_elements[i],
                       "result ", i, " has ", buffer.element_count(), " elements, not ",
                       at.result_elements[i]);
    ElementKind kind = {4, false};  // for a reduction
    int64_t elements = 0;
    if (static_cast<int64_t>(i) < matrices) {
      JAX_TCGEMM_RETURN_IF_ERROR(result_kinds.next(&kind));
      elements = mul_sat(mul_sat(at.matrices, at.m), at.n);
    } else {
      JAX_TCGEMM_RETURN_IF_ERROR(reduced_elements(at, &reductions_of_source, &elements));
    }
    JAX_TCGEMM_REQUIRE(
        static_cast<int64_t>(buffer.element_count()) == elements &&
            static_cast<int64_t>(ffi::ByteWidth(buffer.element_type())) == kind.bytes &&
            (!kind.is_vector || at.n * kind.bytes % kVectorBytes == 0),
        "result ", i, " has ", buffer.element_count(), " elements of type ",
        static_cast<int>(buffer.element_type()), ", the problem ", elements);
    params->results[i] = buffer.untyped_data();
    JAX_TCGEMM_REQUIRE(is_aligned(params->results[i]), "result ", i, " lies at ",
                       params->results[i], ", no multiple of 16 bytes");
  }
  return Status();
}

}  // namespace jax_tcgemm
