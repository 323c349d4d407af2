// Reads the operands and results of a program from its C++, which of_program of
// jax_tcgemm/epilogue/program_source.py writes.

#ifndef JAX_TCGEMM_FFI_PROGRAM_SOURCE_H_
#define JAX_TCGEMM_FFI_PROGRAM_SOURCE_H_

#include <cstdint>
#include <string_view>

#include "common/status.h"

namespace jax_tcgemm {

// Returns the number after `name`, such as "kResults = ", or -1 if there is none.
int64_t number_after(std::string_view source, std::string_view name);

// Checks if "true" follows `name`, such as "kBlockScales = ".
bool is_true_after(std::string_view source, std::string_view name);

// An operand, or a result that is a matrix.
struct ElementKind {
  int64_t bytes;   // of an element
  bool is_vector;  // read or written by vectors of 16 bytes
};

// Reads the kinds in the array `name`, one after the other: "kResult", of which the source has
// `kResult[] = {{2, true}, {4, false}};`, or "kOperand", `kOperand[] = {{Along::kRows, 2,
// false}};`.
class KindReader {
 public:
  KindReader(std::string_view source, std::string_view name);
  Status next(ElementKind* kind);

 private:
  std::string_view rest_;
};

// Reads the dimensions of the reductions' results, one result after the other, from
// `visitor.template reduction<float, 1, Along::kRows, Sum>(0.f);`.
class ReductionReader {
 public:
  explicit ReductionReader(std::string_view source) : rest_(source) {}
  Status next(bool* along_m, bool* along_n);

 private:
  std::string_view rest_;
};

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_FFI_PROGRAM_SOURCE_H_
