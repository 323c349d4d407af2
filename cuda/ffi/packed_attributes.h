// Decodes attributes and buffers for the custom calls for packed weights.

#ifndef JAX_TCGEMM_FFI_PACKED_ATTRIBUTES_H_
#define JAX_TCGEMM_FFI_PACKED_ATTRIBUTES_H_

#include <cstdint>
#include <string_view>

#include "common/status.h"
#include "ffi/attributes.h"
#include "packed_config.h"

namespace jax_tcgemm {

inline Status decode_format(std::string_view name, PackedFormat* format) {
  if (name == "int4") {
    *format = PackedFormat::kInt4;
  } else if (name == "uint4") {
    *format = PackedFormat::kUint4;
  } else if (name == "int8") {
    *format = PackedFormat::kInt8;
  } else {
    JAX_TCGEMM_REQUIRE(name == "float8_e4m3fn", "a weight of ", name);
    *format = PackedFormat::kE4m3;
  }
  return Status();
}

inline Status decode_float(const char* what, std::string_view name, bool may_be_wide,
                           ElementType* type) {
  if (name == "bfloat16") {
    *type = ElementType::kBf16;
  } else if (name == "float16") {
    *type = ElementType::kF16;
  } else {
    JAX_TCGEMM_REQUIRE(name == "float32" && may_be_wide, what, " has type ", name);
    *type = ElementType::kF32;
  }
  return Status();
}

// Checks a buffer's address and size.
inline Status check_buffer(const char* name, const void* data, int64_t bytes, int64_t expected,
                           uintptr_t alignment) {
  JAX_TCGEMM_REQUIRE(bytes == expected, name, " has ", bytes, " bytes, not ", expected);
  JAX_TCGEMM_REQUIRE(reinterpret_cast<uintptr_t>(data) % alignment == 0, name, " lies at ", data);
  return Status();
}

inline int64_t bytes_of(const ffi::AnyBuffer& buffer) {
  return static_cast<int64_t>(buffer.element_count() * ffi::ByteWidth(buffer.element_type()));
}

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_FFI_PACKED_ATTRIBUTES_H_
