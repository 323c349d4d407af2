#include "ffi/compiled_operands.h"

#include <charconv>
#include <cstdint>
#include <string_view>

#include "common/saturating.h"

namespace jax_tcgemm {
namespace {

constexpr int64_t kVectorBytes = 16;

bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0; }

// An operand or a result as the source has it.
struct Kind {
  int64_t bytes = 0;  // of an element
  bool is_vector = false;
};

// Reads the kinds that of_program of jax_tcgemm/epilogue/source.py writes after `name`, such as
// `kResult[] = {{2, true}, {4, false}};`, of operands with where they move before the bytes.
class KindReader {
 public:
  KindReader(std::string_view source, std::string_view name) {
    const size_t at = source.find(name);
    if (at == std::string_view::npos) return;
    rest_ = source.substr(at + name.size());
    rest_ = rest_.substr(0, rest_.find(';'));
  }

  Status next(Kind* kind) {
    const size_t end = rest_.find('}');
    const std::string_view text = rest_.substr(0, end);
    const size_t comma = text.rfind(", ");
    JAX_TCGEMM_REQUIRE(end != std::string_view::npos && comma != std::string_view::npos,
                       "the source of an epilogue has fewer operands or results than the call");
    kind->is_vector = text.substr(comma + 2) == "true";
    const char* first = text.data() + text.find_last_of(" {", comma - 1) + 1;
    std::from_chars(first, text.data() + comma, kind->bytes);
    JAX_TCGEMM_REQUIRE(1 <= kind->bytes && kind->bytes <= 8, "the source of an epilogue has '",
                       text, "'");
    rest_.remove_prefix(end + 1);
    return Status();
  }

 private:
  std::string_view rest_;
};

// The number that the source gives a name; -1 for none.
int64_t number_of(std::string_view source, std::string_view name) {
  const size_t at = source.find(name);
  int64_t value = -1;
  if (at != std::string_view::npos) {
    std::from_chars(source.data() + at + name.size(), source.data() + source.size(), value);
  }
  return value;
}

// Operand i of the epilogue.
Status decode_operand(const EpilogueOperands& at, ffi::RemainingArgs& operands, size_t i,
                      const Kind& kind, CompiledOperand* operand) {
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

}  // namespace

Status decode_epilogue(const EpilogueOperands& at, ffi::RemainingArgs& operands,
                       ffi::RemainingRets& results, CompiledParams* params) {
  const size_t count = at.operand_vectors.size();
  JAX_TCGEMM_REQUIRE(count <= size_t{kMaxCompiledOperands} &&
                         at.operand_strides.size() == count * (at.batch_shape.size() + 2),
                     count, " operands of the epilogue with ", at.operand_strides.size(),
                     " strides; at most ", kMaxCompiledOperands);
  JAX_TCGEMM_REQUIRE(number_of(at.source, "kOperands = ") == static_cast<int64_t>(count), count,
                     " operands, not as the source says");
  KindReader operand_kinds(at.source, "kOperand[] = {");
  for (size_t i = 0; i < count; ++i) {
    Kind kind;
    JAX_TCGEMM_RETURN_IF_ERROR(operand_kinds.next(&kind));
    JAX_TCGEMM_RETURN_IF_ERROR(decode_operand(at, operands, i, kind, &params->operands[i]));
  }
  JAX_TCGEMM_REQUIRE(
      results.size() == at.result_elements.size() && results.size() <= size_t{kMaxCompiledResults},
      results.size(), " results, at most ", kMaxCompiledResults);
  const int64_t matrices = number_of(at.source, "kResults = ");
  const int64_t reductions = number_of(at.source, "kReductions = ");
  JAX_TCGEMM_REQUIRE(0 <= matrices && 0 <= reductions &&
                         matrices + reductions == static_cast<int64_t>(results.size()),
                     results.size(), " results, not as the source says");
  KindReader result_kinds(at.source, "kResult[] = {");
  for (size_t i = 0; i < results.size(); ++i) {
    auto result = results.get<ffi::AnyBuffer>(i);
    JAX_TCGEMM_REQUIRE(result.has_value(), "result ", i, " is missing");
    ffi::AnyBuffer buffer = **result;
    JAX_TCGEMM_REQUIRE(static_cast<int64_t>(buffer.element_count()) == at.result_elements[i],
                       "result ", i, " has ", buffer.element_count(), " elements, not ",
                       at.result_elements[i]);
    if (static_cast<int64_t>(i) < matrices) {
      Kind kind;
      JAX_TCGEMM_RETURN_IF_ERROR(result_kinds.next(&kind));
      JAX_TCGEMM_REQUIRE(
          at.result_elements[i] == at.matrix_elements &&
              static_cast<int64_t>(ffi::ByteWidth(buffer.element_type())) == kind.bytes &&
              (!kind.is_vector || at.n * kind.bytes % kVectorBytes == 0),
          "result ", i, " has ", at.result_elements[i], " elements of type ",
          static_cast<int>(buffer.element_type()), ", the problem ", at.matrix_elements);
    }
    params->results[i] = buffer.untyped_data();
    JAX_TCGEMM_REQUIRE(is_aligned(params->results[i]), "result ", i, " lies at ",
                       params->results[i], ", no multiple of 16 bytes");
  }
  return Status();
}

}  // namespace jax_tcgemm
