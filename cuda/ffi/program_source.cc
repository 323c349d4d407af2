#include "ffi/program_source.h"

#include <charconv>
#include <string>

namespace jax_tcgemm {
namespace {

// Returns the text after `mark`, or an empty text if `mark` is not there.
std::string_view after(std::string_view text, std::string_view mark) {
  const size_t at = text.find(mark);
  return at == std::string_view::npos ? std::string_view() : text.substr(at + mark.size());
}

int64_t number(std::string_view text) {
  int64_t value = -1;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

}  // namespace

int64_t number_after(std::string_view source, std::string_view name) {
  return number(after(source, name));
}

bool is_true_after(std::string_view source, std::string_view name) {
  return after(source, name).starts_with("true");
}

KindReader::KindReader(std::string_view source, std::string_view name)
    : rest_(after(source, std::string(name) + "[] = {")) {
  rest_ = rest_.substr(0, rest_.find(';'));
}

Status KindReader::next(ElementKind* kind) {
  const std::string_view one = after(rest_, "{");
  const std::string_view fields = one.substr(0, one.find('}'));
  const size_t last = fields.rfind(", ");
  JAX_TCGEMM_REQUIRE(last != std::string_view::npos,
                     "the source of an epilogue has fewer operands or results than the call");
  const std::string_view first = fields.substr(0, last);
  const size_t before = first.rfind(' ');
  kind->bytes = number(before == std::string_view::npos ? first : first.substr(before + 1));
  kind->is_vector = fields.substr(last + 2) == "true";
  JAX_TCGEMM_REQUIRE(1 <= kind->bytes && kind->bytes <= 8, "the source of an epilogue has '",
                     fields, "'");
  rest_ = after(one, "}");
  return Status();
}

Status ReductionReader::next(bool* along_m, bool* along_n) {
  rest_ = after(after(rest_, "visitor.template reduction<"), "Along::");
  const std::string_view along = rest_.substr(0, rest_.find(','));
  *along_m = along == "kRows";
  *along_n = along == "kColumns";
  JAX_TCGEMM_REQUIRE(*along_m || *along_n || along == "kNothing",
                     "the source of an epilogue has a reduction along '", along, "'");
  return Status();
}

}  // namespace jax_tcgemm
