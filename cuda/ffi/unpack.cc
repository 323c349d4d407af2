// The custom call that dequantizes a packed weight; see dispatch/packed.h.
//
// Instantiate, once for each call of a program: compiles and loads the kernel.
// Execute: launches the kernel.

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string_view>

#include "common/saturating.h"
#include "common/status.h"
#include "dispatch/packed.h"
#include "ffi/attributes.h"
#include "ffi/handlers.h"
#include "ffi/operands.h"
#include "ffi/packed_attributes.h"

namespace jax_tcgemm {

// Set by jax_tcgemm/lowering/packed.py; the result is (batch, n, k).
struct UnpackAttributes {
  int64_t batch, n, k;
  int64_t group;  // rows of the weight that share a scale
  bool has_zeros;
  std::string_view format, output, scale, digest;
};

}  // namespace jax_tcgemm

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_tcgemm::UnpackAttributes,
                                      ::xla::ffi::StructMember<int64_t>("batch"),
                                      ::xla::ffi::StructMember<int64_t>("n"),
                                      ::xla::ffi::StructMember<int64_t>("k"),
                                      ::xla::ffi::StructMember<int64_t>("group"),
                                      ::xla::ffi::StructMember<bool>("has_zeros"),
                                      ::xla::ffi::StructMember<std::string_view>("format"),
                                      ::xla::ffi::StructMember<std::string_view>("output"),
                                      ::xla::ffi::StructMember<std::string_view>("scale"),
                                      ::xla::ffi::StructMember<std::string_view>("digest"));

namespace jax_tcgemm {
namespace {

// The numbers are those of kernels.UNPACK in jax_tcgemm/kernels/packed.py; the pass has no use for
// them.
Status decode_config(const UnpackAttributes& at, PackedConfig* config) {
  *config = {};
  JAX_TCGEMM_RETURN_IF_ERROR(decode_format(at.format, &config->format));
  JAX_TCGEMM_RETURN_IF_ERROR(decode_float("the result", at.output, false, &config->activation));
  JAX_TCGEMM_RETURN_IF_ERROR(decode_float("a scale", at.scale, true, &config->scale));
  config->output = config->activation;
  config->has_zeros = at.has_zeros;
  config->group = kMostPackedUnit;
  config->tokens = 8;
  config->row_blocks = 1;
  config->k_blocks = config->stages = 2;
  config->split_k = config->blocks_on_sm = 1;
  JAX_TCGEMM_REQUIRE(!at.has_zeros || config->bits() == 4, "zero points of 8 bits");
  return Status();
}

Status decode_and_run(ffi::AnyBuffer values, ffi::AnyBuffer scales, ffi::AnyBuffer w,
                      const UnpackAttributes& at, cudaStream_t stream) {
  for (const int64_t extent : {at.batch, at.n, at.k, at.group}) {
    JAX_TCGEMM_REQUIRE(0 < extent && extent <= kMaxExtent, "batch=", at.batch, " n=", at.n,
                       " k=", at.k, " group=", at.group);
  }
  JAX_TCGEMM_REQUIRE(at.k % kPackedTile == 0 && at.k % at.group == 0 && at.group % 16 == 0,
                     "k=", at.k, " group=", at.group);
  UnpackProblem problem = {};
  JAX_TCGEMM_RETURN_IF_ERROR(decode_config(at, &problem.config));
  const PackedConfig& config = problem.config;
  const int64_t n_tiles = (at.n + kPackedTile - 1) / kPackedTile;
  const int64_t k_tiles = at.k / kPackedTile;
  const int64_t groups = at.k / at.group;
  const int64_t values_bytes = mul_sat(mul_sat(n_tiles, k_tiles), config.tile_bytes());
  const int64_t scales_bytes = mul_sat(mul_sat(n_tiles, groups), config.group_bytes());
  JAX_TCGEMM_RETURN_IF_ERROR(check_buffer("values", values.untyped_data(), bytes_of(values),
                                          mul_sat(at.batch, values_bytes), 16));
  JAX_TCGEMM_RETURN_IF_ERROR(check_buffer("scales", scales.untyped_data(), bytes_of(scales),
                                          mul_sat(at.batch, scales_bytes), 16));
  JAX_TCGEMM_RETURN_IF_ERROR(check_buffer("the result", w.untyped_data(), bytes_of(w),
                                          mul_sat(mul_sat(mul_sat(at.batch, at.n), at.k), 2), 16));
  problem.batch = at.batch;
  problem.digest = at.digest;
  problem.params = {static_cast<const uint8_t*>(values.untyped_data()),
                    static_cast<const uint8_t*>(scales.untyped_data()),
                    w.untyped_data(),
                    static_cast<int32_t>(at.n),
                    static_cast<int32_t>(k_tiles),
                    static_cast<int32_t>(groups),
                    static_cast<int32_t>(at.group),
                    values_bytes,
                    scales_bytes};
  return run_unpack(problem, stream);
}

ffi::Error unpack(cudaStream_t stream, ffi::AnyBuffer values, ffi::AnyBuffer scales,
                  ffi::Result<ffi::AnyBuffer> w, UnpackAttributes attributes) {
  return as_error(decode_and_run(values, scales, *w, attributes, stream));
}

Status prepare(const UnpackAttributes& at) {
  PackedConfig config = {};
  JAX_TCGEMM_RETURN_IF_ERROR(decode_config(at, &config));
  return prepare_unpack(config, at.digest);
}

// XLA may pass buffers without addresses, or none.
ffi::Error instantiate_unpack(ffi::RemainingArgs, ffi::RemainingRets, UnpackAttributes attributes) {
  return as_error(prepare(attributes));
}

// Capturable into a CUDA graph: the handler only enqueues a kernel.
XLA_FFI_DEFINE_HANDLER(kUnpackHandler, unpack,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Attrs<UnpackAttributes>(),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(
    kInstantiateHandler, instantiate_unpack,
    ffi::Ffi::BindInstantiate().RemainingArgs().RemainingRets().Attrs<UnpackAttributes>());

}  // namespace

Target unpack_target() { return {"jax_tcgemm_unpack_v1", kUnpackHandler, kInstantiateHandler}; }

}  // namespace jax_tcgemm
