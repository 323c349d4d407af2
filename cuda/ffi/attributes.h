// The attributes of the custom call, set by jax_tcgemm/lowering/custom_call.py. Only the files of
// this folder include them: no other folder uses XLA.

#ifndef JAX_TCGEMM_FFI_ATTRIBUTES_H_
#define JAX_TCGEMM_FFI_ATTRIBUTES_H_

#include <cstdint>
#include <string_view>

#include "xla/ffi/api/ffi.h"

namespace jax_tcgemm {

namespace ffi = ::xla::ffi;
using Strides = ffi::Span<const int64_t>;

// The largest m, n, k and number of matrices in a batch. The kernels count all of them in 32 bits:
// extents up to the end of the last tile, matrices up to one step of the grid beyond. MAX_EXTENT in
// jax_tcgemm/problem/strides.py is the same number.
constexpr int64_t kMaxExtent = int64_t{1} << 30;

// Checks if a stride in elements is possible: it is not negative, and its bytes fit into 64 bits.
constexpr bool is_stride(int64_t stride) { return 0 <= stride && stride <= int64_t{1} << 56; }

// Strides are in elements.
struct GemmAttributes {
  int64_t m, n, k;
  int64_t padding_bytes;  // of the workspace, for padded copies of unaligned operands
  int64_t b2_offset;      // gated, without b2: from the start of b to the second weight
  Strides batch_shape;
  Strides a_strides;             // (batch..., m, k)
  Strides b_strides;             // (batch..., k, n); of b2 too
  Strides c_strides;             // (batch..., m, n); of c2 too
  Strides bias_strides;          // (batch..., n)
  Strides bias2_strides;         // (batch..., n)
  Strides alpha_strides;         // (batch...)
  Strides beta_strides;          // (batch...)
  Strides row_scale_strides;     // (batch..., m)
  Strides column_scale_strides;  // (batch..., n)
  bool has_c, has_bias, has_alpha, has_beta, has_row_scale, has_column_scale;
  bool has_b2, has_bias2, has_c2, has_aux, has_workspace, gated, beside_collectives, pairs_of_b;
  float alpha, beta, activation_p0, activation_p1;
  std::string_view activation, c_role, algorithm, config;
};

}  // namespace jax_tcgemm

// The members of GemmAttributes, in their order, for this and for calls with further attributes.
#define JAX_TCGEMM_GEMM_MEMBERS                                                                   \
  ::xla::ffi::StructMember<int64_t>("m"), ::xla::ffi::StructMember<int64_t>("n"),                 \
      ::xla::ffi::StructMember<int64_t>("k"), ::xla::ffi::StructMember<int64_t>("padding_bytes"), \
      ::xla::ffi::StructMember<int64_t>("b2_offset"),                                             \
      ::xla::ffi::StructMember<::jax_tcgemm::Strides>("batch_shape"),                             \
      ::xla::ffi::StructMember<::jax_tcgemm::Strides>("a_strides"),                               \
      ::xla::ffi::StructMember<::jax_tcgemm::Strides>("b_strides"),                               \
      ::xla::ffi::StructMember<::jax_tcgemm::Strides>("c_strides"),                               \
      ::xla::ffi::StructMember<::jax_tcgemm::Strides>("bias_strides"),                            \
      ::xla::ffi::StructMember<::jax_tcgemm::Strides>("bias2_strides"),                           \
      ::xla::ffi::StructMember<::jax_tcgemm::Strides>("alpha_strides"),                           \
      ::xla::ffi::StructMember<::jax_tcgemm::Strides>("beta_strides"),                            \
      ::xla::ffi::StructMember<::jax_tcgemm::Strides>("row_scale_strides"),                       \
      ::xla::ffi::StructMember<::jax_tcgemm::Strides>("column_scale_strides"),                    \
      ::xla::ffi::StructMember<bool>("has_c"), ::xla::ffi::StructMember<bool>("has_bias"),        \
      ::xla::ffi::StructMember<bool>("has_alpha"), ::xla::ffi::StructMember<bool>("has_beta"),    \
      ::xla::ffi::StructMember<bool>("has_row_scale"),                                            \
      ::xla::ffi::StructMember<bool>("has_column_scale"),                                         \
      ::xla::ffi::StructMember<bool>("has_b2"), ::xla::ffi::StructMember<bool>("has_bias2"),      \
      ::xla::ffi::StructMember<bool>("has_c2"), ::xla::ffi::StructMember<bool>("has_aux"),        \
      ::xla::ffi::StructMember<bool>("has_workspace"), ::xla::ffi::StructMember<bool>("gated"),   \
      ::xla::ffi::StructMember<bool>("beside_collectives"),                                       \
      ::xla::ffi::StructMember<bool>("pairs_of_b"), ::xla::ffi::StructMember<float>("alpha"),     \
      ::xla::ffi::StructMember<float>("beta"), ::xla::ffi::StructMember<float>("activation_p0"),  \
      ::xla::ffi::StructMember<float>("activation_p1"),                                           \
      ::xla::ffi::StructMember<std::string_view>("activation"),                                   \
      ::xla::ffi::StructMember<std::string_view>("c_role"),                                       \
      ::xla::ffi::StructMember<std::string_view>("algorithm"),                                    \
      ::xla::ffi::StructMember<std::string_view>("config")

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_tcgemm::GemmAttributes, JAX_TCGEMM_GEMM_MEMBERS);

#endif  // JAX_TCGEMM_FFI_ATTRIBUTES_H_
