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

namespace jax_tcgemm {

// Set by jax_tcgemm/lowering/packed.py.
struct PackedAttributes {
  int64_t batch;  // for groups of rows, the number of weights
  int64_t m, n, k;
  int64_t group;                 // rows of the weight that share a scale
  bool has_zeros, weights_move;  // along the batch
  int64_t tokens, row_blocks, k_blocks, stages, split_k, blocks_on_sm;
  std::string_view format, activation, scale, output, digest;
};

}  // namespace jax_tcgemm

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

Status decode_config(const PackedAttributes& at, bool is_ragged, PackedConfig* config) {
  for (const int64_t number :
       {at.tokens, at.row_blocks, at.k_blocks, at.stages, at.split_k, at.blocks_on_sm}) {
    JAX_TCGEMM_REQUIRE(0 < number && number <= 1024, "a configuration with ", number);
  }
  JAX_TCGEMM_RETURN_IF_ERROR(decode_format(at.format, &config->format));
  JAX_TCGEMM_RETURN_IF_ERROR(decode_float("x", at.activation, false, &config->activation));
  JAX_TCGEMM_RETURN_IF_ERROR(decode_float("a scale", at.scale, true, &config->scale));
  JAX_TCGEMM_RETURN_IF_ERROR(decode_float("the result", at.output, true, &config->output));
  config->has_zeros = at.has_zeros;
  config->tokens = static_cast<int>(at.tokens);
  config->row_blocks = static_cast<int>(at.row_blocks);
  config->k_blocks = static_cast<int>(at.k_blocks);
  config->stages = static_cast<int>(at.stages);
  config->split_k = static_cast<int>(at.split_k);
  config->blocks_on_sm = static_cast<int>(at.blocks_on_sm);
  config->is_ragged = is_ragged;
  const int64_t stage_k = config->stage_k();
  // One scale for all k counts as one for a stage.
  const bool is_long = at.group == at.k || at.group > stage_k;
  config->group = static_cast<int>(is_long ? stage_k : at.group);
  JAX_TCGEMM_REQUIRE(!at.has_zeros || config->bits() == 4, "zero points of 8 bits");
  JAX_TCGEMM_REQUIRE(at.group == at.k || at.group <= kMostPackedUnit || at.group % stage_k == 0,
                     "group=", at.group, " for stages of ", stage_k);
  return check_packed(*config);
}

// `group_sizes` is null if all rows have the same weight.
Status decode_and_run(ffi::AnyBuffer x, ffi::AnyBuffer values, ffi::AnyBuffer scales,
                      const ffi::AnyBuffer* group_sizes, ffi::AnyBuffer d,
                      const PackedAttributes& at, cudaStream_t stream) {
  const bool is_ragged = group_sizes != nullptr;
  for (const int64_t extent : {at.batch, at.m, at.n, at.k, at.group}) {
    JAX_TCGEMM_REQUIRE(0 < extent && extent <= kMaxExtent, "batch=", at.batch, " m=", at.m,
                       " n=", at.n, " k=", at.k, " group=", at.group);
  }
  JAX_TCGEMM_REQUIRE(at.k % kPackedTile == 0 && at.k % at.group == 0, "k=", at.k,
                     " group=", at.group);
  PackedProblem problem = {};
  JAX_TCGEMM_RETURN_IF_ERROR(decode_config(at, is_ragged, &problem.config));
  const PackedConfig& config = problem.config;
  PackedParams& params = problem.params;
  JAX_TCGEMM_REQUIRE(!is_ragged || at.weights_move, "groups of rows with one weight");
  const int64_t weights = at.weights_move ? at.batch : 1;
  const int64_t matrices = is_ragged ? 1 : at.batch;  // of x
  const int64_t n_tiles = (at.n + kPackedTile - 1) / kPackedTile;
  const int64_t k_tiles = at.k / kPackedTile;
  const int64_t groups = at.k / at.group;
  const int64_t values_bytes = mul_sat(mul_sat(n_tiles, k_tiles), config.tile_bytes());
  const int64_t scales_bytes = mul_sat(mul_sat(n_tiles, groups), config.group_bytes());
  JAX_TCGEMM_RETURN_IF_ERROR(check_buffer("values", values.untyped_data(), bytes_of(values),
                                          mul_sat(weights, values_bytes), 16));
  JAX_TCGEMM_RETURN_IF_ERROR(check_buffer("scales", scales.untyped_data(), bytes_of(scales),
                                          mul_sat(weights, scales_bytes), 16));
  const int64_t rows = mul_sat(matrices, at.m);
  JAX_TCGEMM_RETURN_IF_ERROR(
      check_buffer("x", x.untyped_data(), bytes_of(x), mul_sat(mul_sat(rows, at.k), 2), 16));
  const int64_t d_bytes = element_bytes(config.output);
  JAX_TCGEMM_RETURN_IF_ERROR(check_buffer("the result", d.untyped_data(), bytes_of(d),
                                          mul_sat(mul_sat(rows, at.n), d_bytes), d_bytes));
  problem.x = x.untyped_data();
  problem.batch = matrices;
  problem.digest = at.digest;
  params.values = static_cast<const uint8_t*>(values.untyped_data());
  params.scales = static_cast<const uint8_t*>(scales.untyped_data());
  params.d = d.untyped_data();
  params.m = static_cast<int32_t>(at.m);
  params.n = static_cast<int32_t>(at.n);
  params.k_tiles = static_cast<int32_t>(k_tiles);
  params.groups = static_cast<int32_t>(groups);
  const int64_t stages = (at.k + config.stage_k() - 1) / config.stage_k();
  params.stages_per_group =
      static_cast<int32_t>(groups == 1                   ? stages
                           : at.group > config.stage_k() ? at.group / config.stage_k()
                                                         : 1);
  params.by_vectors =
      at.n % 4 == 0 && reinterpret_cast<uintptr_t>(d.untyped_data()) % (4 * d_bytes) == 0;
  params.values_batch = at.weights_move ? values_bytes : 0;
  params.scales_batch = at.weights_move ? scales_bytes : 0;
  if (is_ragged) {
    JAX_TCGEMM_RETURN_IF_ERROR(check_buffer("group_sizes", group_sizes->untyped_data(),
                                            bytes_of(*group_sizes), mul_sat(weights, 4), 4));
    JAX_TCGEMM_REQUIRE(group_sizes->element_type() == ffi::S32, "group_sizes are not int32");
    params.group_sizes = static_cast<const int32_t*>(group_sizes->untyped_data());
    params.experts = static_cast<int32_t>(weights);
  }
  JAX_TCGEMM_REQUIRE(config.split_k <= stages, "split_k=", config.split_k, " of ", stages,
                     " stages");
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
  JAX_TCGEMM_RETURN_IF_ERROR(decode_config(at, is_ragged, &config));
  return prepare_packed(config, at.digest);
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

void* packed_handler() { return reinterpret_cast<void*>(+kPackedHandler); }
void* packed_instantiate_handler() { return reinterpret_cast<void*>(+kInstantiateHandler); }
void* packed_ragged_handler() { return reinterpret_cast<void*>(+kPackedRaggedHandler); }
void* packed_ragged_instantiate_handler() {
  return reinterpret_cast<void*>(+kInstantiateRaggedHandler);
}

}  // namespace jax_tcgemm
