// The custom call of a product whose epilogue is compiled at run time, in parts that the overlapped
// call shares.

#ifndef JAX_TCGEMM_FFI_COMPILED_H_
#define JAX_TCGEMM_FFI_COMPILED_H_

#include <cstdint>
#include <string_view>

#include "common/status.h"
#include "compiled_params.h"
#include "dispatch/run_time_kernel.h"
#include "ffi/attributes.h"
#include "gemm_problem.h"

namespace jax_tcgemm {

// Set by jax_tcgemm/lowering/jit_call.py. Operands: a, b, [b2 or group_sizes], [block scales of a
// and b], those of the epilogue. Results: those of the epilogue, [the workspace]. Groups divide the
// rows; the batch of b then has a matrix for each group.
struct CompiledAttributes {
  int64_t m, n, k;
  int64_t b2_offset;
  Strides batch_shape;
  Strides a_strides;        // (batch..., m, k)
  Strides b_strides;        // (batch..., k, n)
  Strides a_scale_strides;  // (batch..., m, blocks of k); empty: there are no scales
  Strides b_scale_strides;  // (batch..., blocks of k, blocks of n)
  Strides operand_strides;  // (batch..., m, n), one operand of the epilogue after the other
  Strides operand_vectors;  // 1 if the kernel reads an operand by vectors of 16 bytes
  Strides result_elements;
  int64_t warp_bytes;  // see EpilogueProgram
  bool has_b2, gated, has_groups;
  std::string_view algorithm, config, digest, source;

  bool has_scales() const { return a_scale_strides.size() > 0; }
  // Returns the number of operands before those of the epilogue.
  size_t own_operands() const {
    return 2 + (has_b2 || has_groups ? 1 : 0) + (has_scales() ? 2 : 0);
  }
};

// A decoded call.
struct CompiledCall {
  GemmProblem problem;
  CompiledParams params;
  EpilogueProgram program;
};

// Decodes a call that is not empty.
Status decode_compiled(const CompiledAttributes& at, ffi::RemainingArgs& operands,
                       ffi::RemainingRets& results, CompiledCall* call);

// Prepares the kernel of `rows` rows for the process's current GPU. For another kind of GPU the
// first run compiles it.
Status prepare_rows(const CompiledAttributes& at, int64_t rows, int64_t workspace_bytes = 0);

}  // namespace jax_tcgemm

// The members of CompiledAttributes, in their order.
#define JAX_TCGEMM_COMPILED_MEMBERS                                                              \
  ::xla::ffi::StructMember<int64_t>("m"), ::xla::ffi::StructMember<int64_t>("n"),                \
      ::xla::ffi::StructMember<int64_t>("k"), ::xla::ffi::StructMember<int64_t>("b2_offset"),    \
      ::xla::ffi::StructMember<::jax_tcgemm::Strides>("batch_shape"),                            \
      ::xla::ffi::StructMember<::jax_tcgemm::Strides>("a_strides"),                              \
      ::xla::ffi::StructMember<::jax_tcgemm::Strides>("b_strides"),                              \
      ::xla::ffi::StructMember<::jax_tcgemm::Strides>("a_scale_strides"),                        \
      ::xla::ffi::StructMember<::jax_tcgemm::Strides>("b_scale_strides"),                        \
      ::xla::ffi::StructMember<::jax_tcgemm::Strides>("operand_strides"),                        \
      ::xla::ffi::StructMember<::jax_tcgemm::Strides>("operand_vectors"),                        \
      ::xla::ffi::StructMember<::jax_tcgemm::Strides>("result_elements"),                        \
      ::xla::ffi::StructMember<int64_t>("warp_bytes"), ::xla::ffi::StructMember<bool>("has_b2"), \
      ::xla::ffi::StructMember<bool>("gated"), ::xla::ffi::StructMember<bool>("has_groups"),     \
      ::xla::ffi::StructMember<std::string_view>("algorithm"),                                   \
      ::xla::ffi::StructMember<std::string_view>("config"),                                      \
      ::xla::ffi::StructMember<std::string_view>("digest"),                                      \
      ::xla::ffi::StructMember<std::string_view>("source")

#endif  // JAX_TCGEMM_FFI_COMPILED_H_
