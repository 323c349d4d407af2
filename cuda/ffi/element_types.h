// XLA's element types as ours.

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

// Of D or of what is added to it.
inline bool is_output(ElementType type, Algorithm algorithm) {
  const Arithmetic arithmetic = arithmetic_of(algorithm);
  return type == arithmetic.output || type == arithmetic.wide_output;
}

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_FFI_ELEMENT_TYPES_H_
