#include "ffi/packed_operands.h"

#include <cstdint>

#include "common/saturating.h"
#include "ffi/operands.h"
#include "ffi/packed_attributes.h"

namespace jax_tcgemm {
namespace {

int64_t values_bytes(const PackedAttributes& at, const PackedConfig& config) {
  const int64_t n_tiles = (at.n + kPackedTile - 1) / kPackedTile;
  return mul_sat(mul_sat(n_tiles, at.k / kPackedTile), config.tile_bytes());
}

int64_t scales_bytes(const PackedAttributes& at, const PackedConfig& config) {
  const int64_t n_tiles = (at.n + kPackedTile - 1) / kPackedTile;
  return mul_sat(mul_sat(n_tiles, at.k / at.group), config.group_bytes());
}

}  // namespace

Status decode_packed_config(const PackedAttributes& at, const PackedUse& use,
                            PackedConfig* config) {
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
  config->is_ragged = use.is_ragged;
  config->weights = use.weights;
  const int64_t stage_k = config->stage_k();
  // One scale for all k counts as one for a stage.
  const bool is_long = at.group == at.k || at.group > stage_k;
  config->group = static_cast<int>(is_long ? stage_k : at.group);
  JAX_TCGEMM_REQUIRE(!at.has_zeros || config->bits() == 4, "zero points of 8 bits");
  JAX_TCGEMM_REQUIRE(at.group == at.k || at.group <= kMostPackedUnit || at.group % stage_k == 0,
                     "group=", at.group, " for stages of ", stage_k);
  return check_packed(*config);
}

Status check_packed_weight(const PackedAttributes& at, const PackedConfig& config,
                           ffi::AnyBuffer values, ffi::AnyBuffer scales) {
  const int64_t weights = at.weights_move ? at.batch : 1;
  JAX_TCGEMM_RETURN_IF_ERROR(check_buffer("values", values.untyped_data(), bytes_of(values),
                                          mul_sat(weights, values_bytes(at, config)), 16));
  return check_buffer("scales", scales.untyped_data(), bytes_of(scales),
                      mul_sat(weights, scales_bytes(at, config)), 16);
}

Status decode_packed(const PackedAttributes& at, const PackedUse& use, ffi::AnyBuffer x,
                     ffi::AnyBuffer values, ffi::AnyBuffer scales, PackedProblem* problem) {
  for (const int64_t extent : {at.batch, at.m, at.n, at.k, at.group}) {
    JAX_TCGEMM_REQUIRE(0 < extent && extent <= kMaxExtent, "batch=", at.batch, " m=", at.m,
                       " n=", at.n, " k=", at.k, " group=", at.group);
  }
  JAX_TCGEMM_REQUIRE(at.k % kPackedTile == 0 && at.k % at.group == 0, "k=", at.k,
                     " group=", at.group);
  JAX_TCGEMM_REQUIRE(!use.is_ragged || at.weights_move, "groups of rows with one weight");
  JAX_TCGEMM_RETURN_IF_ERROR(decode_packed_config(at, use, &problem->config));
  const PackedConfig& config = problem->config;
  JAX_TCGEMM_RETURN_IF_ERROR(check_packed_weight(at, config, values, scales));
  problem->batch = use.is_ragged ? 1 : at.batch;
  const int64_t rows = mul_sat(problem->batch, at.m);
  JAX_TCGEMM_RETURN_IF_ERROR(
      check_buffer("x", x.untyped_data(), bytes_of(x), mul_sat(mul_sat(rows, at.k), 2), 16));
  problem->x = x.untyped_data();
  problem->digest = at.digest;
  PackedParams& params = problem->params;
  params.values = static_cast<const uint8_t*>(values.untyped_data());
  params.scales = static_cast<const uint8_t*>(scales.untyped_data());
  params.m = static_cast<int32_t>(at.m);
  params.n = static_cast<int32_t>(at.n);
  params.k_tiles = static_cast<int32_t>(at.k / kPackedTile);
  params.groups = static_cast<int32_t>(at.k / at.group);
  const int64_t stages = (at.k + config.stage_k() - 1) / config.stage_k();
  params.stages_per_group =
      static_cast<int32_t>(params.groups == 1            ? stages
                           : at.group > config.stage_k() ? at.group / config.stage_k()
                                                         : 1);
  params.values_batch = at.weights_move ? values_bytes(at, config) : 0;
  params.scales_batch = at.weights_move ? scales_bytes(at, config) : 0;
  JAX_TCGEMM_REQUIRE(config.split_k <= stages, "split_k=", config.split_k, " of ", stages,
                     " stages");
  return Status();
}

}  // namespace jax_tcgemm
