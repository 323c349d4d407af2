// Decodes the custom call that packs 4-bit values into a PackProblem.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/saturating.h"
#include "common/status.h"
#include "ffi/attributes.h"
#include "ffi/handlers.h"
#include "ffi/operands.h"
#include "ffi/packed_attributes.h"
#include "passes/pack_values.h"
#include "shared_limits.h"

namespace jax_tcgemm {

// Set by jax_tcgemm/lowering/unpacked.py; the operand is (batch, k, n), or (batch, n, k) if it is
// `transposed`.
struct PackAttributes {
  int64_t batch, n, k;
  bool transposed;
};

}  // namespace jax_tcgemm

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_tcgemm::PackAttributes,
                                      ::xla::ffi::StructMember<int64_t>("batch"),
                                      ::xla::ffi::StructMember<int64_t>("n"),
                                      ::xla::ffi::StructMember<int64_t>("k"),
                                      ::xla::ffi::StructMember<bool>("transposed"));

namespace jax_tcgemm {
namespace {

// Turns int4 in two's complement into the codes of the layout.
constexpr uint32_t kSignBits = 0x88888888;

Status decode_and_run(ffi::AnyBuffer in, ffi::AnyBuffer out, const PackAttributes& at,
                      cudaStream_t stream) {
  for (const int64_t extent : {at.batch, at.n, at.k}) {
    JAX_TCGEMM_REQUIRE(0 < extent && extent <= kMaxExtent, "batch=", at.batch, " n=", at.n,
                       " k=", at.k);
  }
  const int64_t columns = at.transposed ? at.k : at.n;
  const int64_t n_tiles = (at.n + kPackedTile - 1) / kPackedTile;
  const int64_t k_tiles = at.k / kPackedTile;
  JAX_TCGEMM_REQUIRE(at.k % kPackedTile == 0 && columns % kPackVectorValues == 0,
                     "batch=", at.batch, " n=", at.n, " k=", at.k);
  JAX_TCGEMM_REQUIRE(
      (at.transposed ? n_tiles : k_tiles) <= kMaxGridRows && at.batch <= kMaxGridRows,
      "batch=", at.batch, " n=", at.n, " k=", at.k);
  const bool is_signed = in.element_type() == ffi::DataType::S4;
  JAX_TCGEMM_REQUIRE(is_signed || in.element_type() == ffi::DataType::U4, "values of type ",
                     static_cast<int>(in.element_type()));
  const auto count = static_cast<int64_t>(in.element_count());
  JAX_TCGEMM_REQUIRE(count == mul_sat(at.batch, mul_sat(at.n, at.k)), count, " values, not ",
                     at.batch, " x ", at.n, " x ", at.k);
  JAX_TCGEMM_REQUIRE(reinterpret_cast<uintptr_t>(in.untyped_data()) % 16 == 0, "the values lie at ",
                     in.untyped_data());
  const int64_t tiles = mul_sat(at.batch, mul_sat(n_tiles, k_tiles));
  const int64_t bytes = mul_sat(tiles, kPackedTile * kPackedTile / 2);
  JAX_TCGEMM_RETURN_IF_ERROR(
      check_buffer("the result", out.untyped_data(), bytes_of(out), bytes, 16));
  PackProblem problem = {};
  problem.in = in.untyped_data();
  problem.out = out.untyped_data();
  problem.batch = static_cast<int32_t>(at.batch);
  problem.n = static_cast<int32_t>(at.n);
  problem.k = static_cast<int32_t>(at.k);
  problem.transposed = at.transposed;
  problem.flipped = is_signed ? kSignBits : 0;
  JAX_TCGEMM_CUDA_CHECK(launch_pack(problem, stream), "batch=", at.batch, " n=", at.n, " k=", at.k);
  return Status();
}

ffi::Error pack(cudaStream_t stream, ffi::AnyBuffer in, ffi::Result<ffi::AnyBuffer> out,
                PackAttributes attributes) {
  return as_error(decode_and_run(in, *out, attributes, stream));
}

// Capturable into a CUDA graph: the handler only enqueues a kernel.
XLA_FFI_DEFINE_HANDLER(kPackHandler, pack,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Attrs<PackAttributes>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

Target pack_target() { return {"jax_tcgemm_pack_v1", kPackHandler}; }

}  // namespace jax_tcgemm
