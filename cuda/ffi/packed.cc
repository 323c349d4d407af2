// The custom calls that multiply by packed weights: all rows by one, or groups of consecutive rows
// by one each. See dispatch/packed.h.
//
// Instantiate, once for each call of a program: compiles and loads the kernel.
// Execute: launches the kernel.

#include "dispatch/packed.h"

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string_view>

#include "common/saturating.h"
#include "common/status.h"
#include "ffi/attributes.h"
#include "ffi/handlers.h"
#include "ffi/operands.h"
#include "ffi/packed_attributes.h"
#include "ffi/packed_operands.h"

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    ::jax_tcgemm::PackedAttributes, ::xla::ffi::StructMember<int64_t>("batch"),
    ::xla::ffi::StructMember<int64_t>("m"), ::xla::ffi::StructMember<int64_t>("n"),
    ::xla::ffi::StructMember<int64_t>("k"), ::xla::ffi::StructMember<int64_t>("group"),
    ::xla::ffi::StructMember<bool>("has_zeros"), ::xla::ffi::StructMember<bool>("weights_move"),
    ::xla::ffi::StructMember<int64_t>("tokens"), ::xla::ffi::StructMember<int64_t>("row_blocks"),
    ::xla::ffi::StructMember<int64_t>("k_blocks"), ::xla::ffi::StructMember<int64_t>("stages"),
    ::xla::ffi::StructMember<int64_t>("split_k"), ::xla::ffi::StructMember<int64_t>("blocks_on_sm"),
    ::xla::ffi::StructMember<std::string_view>("format"),
    ::xla::ffi::StructMember<std::string_view>("activation"),
    ::xla::ffi::StructMember<std::string_view>("scale"),
    ::xla::ffi::StructMember<std::string_view>("output"),
    ::xla::ffi::StructMember<std::string_view>("digest"));

namespace jax_tcgemm {
namespace {

// `group_sizes` is null if all rows have the same weight.
Status decode_and_run(ffi::AnyBuffer x, ffi::AnyBuffer values, ffi::AnyBuffer scales,
                      const ffi::AnyBuffer* group_sizes, ffi::AnyBuffer d,
                      const PackedAttributes& at, cudaStream_t stream) {
  const bool is_ragged = group_sizes != nullptr;
  PackedProblem problem = {};
  JAX_TCGEMM_RETURN_IF_ERROR(decode_packed(at, {is_ragged, 1}, x, values, scales, &problem));
  PackedParams& params = problem.params;
  const int64_t d_bytes = element_bytes(problem.config.output);
  const int64_t rows = mul_sat(problem.batch, at.m);
  JAX_TCGEMM_RETURN_IF_ERROR(check_buffer("the result", d.untyped_data(), bytes_of(d),
                                          mul_sat(mul_sat(rows, at.n), d_bytes), d_bytes));
  params.d = d.untyped_data();
  params.by_vectors =
      at.n % 4 == 0 && reinterpret_cast<uintptr_t>(d.untyped_data()) % (4 * d_bytes) == 0;
  if (is_ragged) {
    JAX_TCGEMM_RETURN_IF_ERROR(check_buffer("group_sizes", group_sizes->untyped_data(),
                                            bytes_of(*group_sizes), mul_sat(at.batch, 4), 4));
    JAX_TCGEMM_REQUIRE(group_sizes->element_type() == ffi::S32, "group_sizes are not int32");
    params.group_sizes = static_cast<const int32_t*>(group_sizes->untyped_data());
    params.experts = static_cast<int32_t>(at.batch);
  }
  return run_packed(problem, stream);
}

ffi::Error packed(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer values,
                  ffi::AnyBuffer scales, ffi::Result<ffi::AnyBuffer> d,
                  PackedAttributes attributes) {
  return as_error(decode_and_run(x, values, scales, nullptr, *d, attributes, stream));
}

ffi::Error packed_ragged(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer values,
                         ffi::AnyBuffer scales, ffi::AnyBuffer group_sizes,
                         ffi::Result<ffi::AnyBuffer> d, PackedAttributes attributes) {
  return as_error(decode_and_run(x, values, scales, &group_sizes, *d, attributes, stream));
}

Status prepare(const PackedAttributes& at, bool is_ragged) {
  PackedConfig config = {};
  JAX_TCGEMM_RETURN_IF_ERROR(decode_packed_config(at, {is_ragged, 1}, &config));
  return prepare_packed(config, at.digest, {});
}

// XLA may pass buffers without addresses, or none.
ffi::Error instantiate_packed(ffi::RemainingArgs, ffi::RemainingRets, PackedAttributes attributes) {
  return as_error(prepare(attributes, false));
}

ffi::Error instantiate_packed_ragged(ffi::RemainingArgs, ffi::RemainingRets,
                                     PackedAttributes attributes) {
  return as_error(prepare(attributes, true));
}

// Capturable into a CUDA graph: the handlers only enqueue a kernel.
XLA_FFI_DEFINE_HANDLER(kPackedHandler, packed,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Attrs<PackedAttributes>(),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kPackedRaggedHandler, packed_ragged,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Attrs<PackedAttributes>(),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(
    kInstantiateHandler, instantiate_packed,
    ffi::Ffi::BindInstantiate().RemainingArgs().RemainingRets().Attrs<PackedAttributes>());

XLA_FFI_DEFINE_HANDLER(
    kInstantiateRaggedHandler, instantiate_packed_ragged,
    ffi::Ffi::BindInstantiate().RemainingArgs().RemainingRets().Attrs<PackedAttributes>());

}  // namespace

Target packed_target() { return {"jax_tcgemm_packed_v1", kPackedHandler, kInstantiateHandler}; }
Target packed_ragged_target() {
  return {"jax_tcgemm_packed_ragged_v1", kPackedRaggedHandler, kInstantiateRaggedHandler};
}

}  // namespace jax_tcgemm
