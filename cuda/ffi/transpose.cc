// Decodes the custom call that transposes an 8-bit operand into a TransposeProblem.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/saturating.h"
#include "common/status.h"
#include "ffi/attributes.h"
#include "ffi/handlers.h"
#include "ffi/operands.h"
#include "passes/transpose_bytes.h"

namespace jax_tcgemm {

// Set by jax_tcgemm/lowering/layout.py: (batch, rows, columns) -> (batch, columns, out_ld), with
// strides in elements.
struct TransposeAttributes {
  int64_t batch, rows, columns;
  int64_t in_ld, in_batch_stride, out_ld;
};

}  // namespace jax_tcgemm

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_tcgemm::TransposeAttributes,
                                      ::xla::ffi::StructMember<int64_t>("batch"),
                                      ::xla::ffi::StructMember<int64_t>("rows"),
                                      ::xla::ffi::StructMember<int64_t>("columns"),
                                      ::xla::ffi::StructMember<int64_t>("in_ld"),
                                      ::xla::ffi::StructMember<int64_t>("in_batch_stride"),
                                      ::xla::ffi::StructMember<int64_t>("out_ld"));

namespace jax_tcgemm {
namespace {

Status decode_and_run(ffi::AnyBuffer in, ffi::AnyBuffer out, const TransposeAttributes& at,
                      cudaStream_t stream) {
  for (const int64_t extent : {at.batch, at.rows, at.columns, at.out_ld}) {
    JAX_TCGEMM_REQUIRE(0 < extent && extent <= kMaxExtent, "batch=", at.batch, " rows=", at.rows,
                       " columns=", at.columns, " out_ld=", at.out_ld);
  }
  JAX_TCGEMM_REQUIRE(
      ffi::ByteWidth(in.element_type()) == 1 && in.element_type() == out.element_type(),
      "element types ", static_cast<int>(in.element_type()), " and ",
      static_cast<int>(out.element_type()), " are not one of a byte");
  JAX_TCGEMM_REQUIRE(at.out_ld >= at.rows && at.out_ld % kTransposedMultiple == 0,
                     "out_ld=", at.out_ld, " for rows=", at.rows);
  JAX_TCGEMM_REQUIRE(is_stride(at.in_ld) && is_stride(at.in_batch_stride), "in_ld=", at.in_ld,
                     " in_batch_stride=", at.in_batch_stride);
  AddressedSpan addressed;
  addressed.add_dimension(at.batch, at.in_batch_stride);
  addressed.add_dimension(at.rows, at.in_ld);
  addressed.add_dimension(at.columns, 1);
  const auto available = static_cast<int64_t>(in.element_count());
  JAX_TCGEMM_REQUIRE(addressed.elements() <= available, "the operand is addressed up to element ",
                     addressed.elements(), " but has ", available);
  const int64_t elements = mul_sat(mul_sat(at.batch, at.columns), at.out_ld);
  JAX_TCGEMM_REQUIRE(static_cast<int64_t>(out.element_count()) == elements, "the result has ",
                     out.element_count(), " elements, not ", elements);
  JAX_TCGEMM_REQUIRE(reinterpret_cast<uintptr_t>(out.untyped_data()) % 16 == 0,
                     "the result lies at ", out.untyped_data());
  const TransposeProblem problem = {in.untyped_data(),
                                    out.untyped_data(),
                                    static_cast<int32_t>(at.batch),
                                    static_cast<int32_t>(at.rows),
                                    static_cast<int32_t>(at.columns),
                                    at.in_ld,
                                    at.in_batch_stride,
                                    static_cast<int32_t>(at.out_ld)};
  JAX_TCGEMM_CUDA_CHECK(launch_transpose(problem, stream), "batch=", at.batch, " rows=", at.rows,
                        " columns=", at.columns);
  return Status();
}

ffi::Error transpose(cudaStream_t stream, ffi::AnyBuffer in, ffi::Result<ffi::AnyBuffer> out,
                     TransposeAttributes attributes) {
  return as_error(decode_and_run(in, *out, attributes, stream));
}

// Capturable into a CUDA graph: the handler only enqueues a kernel.
XLA_FFI_DEFINE_HANDLER(kTransposeHandler, transpose,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Attrs<TransposeAttributes>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

Target transpose_target() { return {"jax_tcgemm_transpose_v1", kTransposeHandler}; }

}  // namespace jax_tcgemm
