// The custom call that runs a program as a pass over its operands; see dispatch/compiled_pass.h.
//
// Instantiate, once for each call of a program: compiles and loads the kernel.
// Execute: launches the kernel.

#include "dispatch/compiled_pass.h"

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string_view>

#include "common/status.h"
#include "ffi/attributes.h"
#include "ffi/compiled_operands.h"
#include "ffi/handlers.h"
#include "ffi/operands.h"

namespace jax_tcgemm {

// Set by jax_tcgemm/lowering/jit_pass.py.
struct PassAttributes {
  int64_t m, n;
  Strides batch_shape;
  Strides operand_strides;  // (batch..., m, n), one operand after the other
  Strides operand_vectors;  // 1 if the kernel reads an operand by vectors of 16 bytes
  Strides result_elements;
  std::string_view digest, source;
};

}  // namespace jax_tcgemm

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    ::jax_tcgemm::PassAttributes, ::xla::ffi::StructMember<int64_t>("m"),
    ::xla::ffi::StructMember<int64_t>("n"),
    ::xla::ffi::StructMember<::jax_tcgemm::Strides>("batch_shape"),
    ::xla::ffi::StructMember<::jax_tcgemm::Strides>("operand_strides"),
    ::xla::ffi::StructMember<::jax_tcgemm::Strides>("operand_vectors"),
    ::xla::ffi::StructMember<::jax_tcgemm::Strides>("result_elements"),
    ::xla::ffi::StructMember<std::string_view>("digest"),
    ::xla::ffi::StructMember<std::string_view>("source"));

namespace jax_tcgemm {
namespace {

Status decode_and_run(const PassAttributes& at, ffi::RemainingArgs& operands,
                      ffi::RemainingRets& results, int32_t ordinal, cudaStream_t stream) {
  GemmAttributes shape = {};
  shape.m = at.m;
  shape.n = at.n;
  shape.batch_shape = at.batch_shape;
  CompiledParams params = {};
  JAX_TCGEMM_RETURN_IF_ERROR(decode_shape(shape, &params));
  if (params.batch == 0 || params.m == 0 || params.n == 0) return Status();
  const EpilogueOperands of_program = {at.m,
                                       at.n,
                                       at.batch_shape,
                                       at.operand_strides,
                                       at.operand_vectors,
                                       at.result_elements,
                                       0,
                                       params.batch,
                                       kPassRows,
                                       kPassColumns,
                                       at.source};
  JAX_TCGEMM_RETURN_IF_ERROR(decode_epilogue(of_program, operands, results, &params));
  const DeviceProperties* device = nullptr;
  JAX_TCGEMM_RETURN_IF_ERROR(get_device_properties(ordinal, &device));
  return run_pass(params, {at.digest, at.source}, *device, stream);
}

ffi::Error compiled_pass(cudaStream_t stream, int32_t ordinal, ffi::RemainingArgs operands,
                         ffi::RemainingRets results, PassAttributes attributes) {
  return as_error(decode_and_run(attributes, operands, results, ordinal, stream));
}

Status prepare(const PassAttributes& at) {
  const DeviceProperties* device = nullptr;
  JAX_TCGEMM_RETURN_IF_ERROR(current_device(&device));
  return device == nullptr ? Status() : prepare_pass({at.digest, at.source}, *device);
}

// XLA may pass buffers without addresses, or none.
ffi::Error instantiate_compiled_pass(ffi::RemainingArgs, ffi::RemainingRets,
                                     PassAttributes attributes) {
  return as_error(prepare(attributes));
}

// Capturable into a CUDA graph: the handler only enqueues a kernel.
XLA_FFI_DEFINE_HANDLER(kCompiledPassHandler, compiled_pass,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs<PassAttributes>(),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(
    kInstantiateHandler, instantiate_compiled_pass,
    ffi::Ffi::BindInstantiate().RemainingArgs().RemainingRets().Attrs<PassAttributes>());

}  // namespace

Target compiled_pass_target() {
  return {"jax_tcgemm_compiled_pass_v2", kCompiledPassHandler, kInstantiateHandler};
}

}  // namespace jax_tcgemm
