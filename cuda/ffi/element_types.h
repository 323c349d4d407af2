// Converts XLA's element types to this package's.

#ifndef JAX_TCGEMM_FFI_ELEMENT_TYPES_H_
#define JAX_TCGEMM_FFI_ELEMENT_TYPES_H_

#include "arithmetic.h"
#include "common/status.h"
#include "ffi/attributes.h"

namespace jax_tcgemm {

inline Status decode_type(const char* what, ffi::DataType from, ElementType* type) {
  *type = {};
  switch (from) {
#define JAX_TCGEMM_CASE(Type, kBytes, Device, Ffi, Tma) \
  case ffi::Ffi:                                        \
    *type = ElementType::Type;                          \
    return Status();
    JAX_TCGEMM_ELEMENT_TYPES(JAX_TCGEMM_CASE)
#undef JAX_TCGEMM_CASE
    default:
      JAX_TCGEMM_REQUIRE(false, what, " has element type ", static_cast<int>(from));
  }
}

// Decodes the type of A, B or D. A complex number counts as a pair of real numbers, which extents
// and strides count.
inline Status decode_real_type(const char* what, ffi::DataType from, ElementType* type) {
  return decode_type(what, from == ffi::C64 ? ffi::F32 : from, type);
}

// Returns the number of real numbers in a buffer.
inline int64_t real_count(const ffi::AnyBuffer& buffer) {
  const auto count = static_cast<int64_t>(buffer.element_count());
  return buffer.element_type() == ffi::C64 ? 2 * count : count;
}

// Returns the bytes of a real number of a buffer.
inline int64_t real_bytes(ffi::DataType type) {
  return static_cast<int64_t>(ffi::ByteWidth(type == ffi::C64 ? ffi::F32 : type));
}

// Checks if D and its addends may have this type.
inline bool is_output(ElementType type, Algorithm algorithm) {
  const Arithmetic arithmetic = arithmetic_of(algorithm);
  return type == arithmetic.output || type == arithmetic.wide_output;
}

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_FFI_ELEMENT_TYPES_H_
