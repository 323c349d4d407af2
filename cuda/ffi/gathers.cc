// The custom call that makes a buffer for the rows of all devices: see overlap/gathers.h.
//
// It writes nothing. XLA knows the buffer as a function of the rows of this device, so it joins the
// calls of equal rows into one.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/saturating.h"
#include "common/status.h"
#include "ffi/attributes.h"
#include "ffi/handlers.h"
#include "ffi/operands.h"
#include "overlap/gathers.h"

namespace jax_tcgemm {

// Set by jax_tcgemm/lowering/overlapped.py.
struct GathersAttributes {
  int64_t group_size;  // devices of a group
  Strides devices;     // numbers of the devices of each group: calls of other groups differ
};

}  // namespace jax_tcgemm

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_tcgemm::GathersAttributes,
                                      ::xla::ffi::StructMember<int64_t>("group_size"),
                                      ::xla::ffi::StructMember<::jax_tcgemm::Strides>("devices"));

namespace jax_tcgemm {
namespace {

Status begin_gather(const GathersAttributes& at, const ffi::AnyBuffer& shard,
                    const ffi::AnyBuffer& rows, int64_t run, int32_t ordinal) {
  const auto shard_bytes = static_cast<int64_t>(shard.size_bytes());
  const auto bytes = static_cast<int64_t>(rows.size_bytes());
  JAX_TCGEMM_REQUIRE(at.group_size >= 2 && bytes == mul_sat(shard_bytes, at.group_size), bytes,
                     " bytes for the rows of ", at.group_size, " devices with ", shard_bytes,
                     " bytes each");
  Gathers::of_device(ordinal).begin(
      run, {shard.untyped_data(), static_cast<char*>(rows.untyped_data()), shard_bytes, bytes});
  return Status();
}

ffi::Error gathers(int32_t ordinal, ffi::RunId run, ffi::AnyBuffer shard,
                   ffi::Result<ffi::AnyBuffer> rows, GathersAttributes attributes) {
  return as_error(begin_gather(attributes, shard, *rows, run.run_id, ordinal));
}

// Not capturable into a CUDA graph: each run makes a new buffer.
XLA_FFI_DEFINE_HANDLER(kGathersHandler, gathers,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Ctx<ffi::RunId>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Attrs<GathersAttributes>());

}  // namespace

Target gathers_target() { return {"jax_tcgemm_gathers_v1", kGathersHandler}; }

}  // namespace jax_tcgemm
