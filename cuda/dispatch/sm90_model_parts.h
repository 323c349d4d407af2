// Parts that the time models of the sm90 families share: tiles, clusters, bytes.

#ifndef JAX_TCGEMM_DISPATCH_SM90_MODEL_PARTS_H_
#define JAX_TCGEMM_DISPATCH_SM90_MODEL_PARTS_H_

#include <stdint.h>

#include <algorithm>
#include <cmath>
#include <span>

#include "common/ceil_div.h"
#include "dispatch/heuristic.h"
#include "kernel_config.h"
#include "sm90/output/output_tile.h"

namespace jax_tcgemm::sm90 {

// Cost of a request to L2 for a row that begins at a multiple of 16 bytes only, and of 32 bytes (a
// sector), relative to a row at a multiple of 64.
constexpr double kHalfSectorFactor = 1.82;
constexpr double kSectorFactor = 1.26;

// Share of the SMs on which clusters of more than two blocks find room.
constexpr double kUsableSms = 120.0 / 132;

// Returns the number of clusters that run at once. A cluster's blocks share a GPC, and not every
// GPC has a multiple of 4 SMs.
inline int64_t concurrent_clusters(const KernelConfig& config, const ChoiceInput& input) {
  const int size = config.cluster_size();
  const double usable = size <= 2 ? 1.0 : kUsableSms;
  const int blocks = config.blocks_on_sm();
  return std::max<int64_t>(1, static_cast<int64_t>(input.sm_count * blocks * usable / size));
}

// Extents of D, or of D^T if a row computes that.
struct Extents {
  int64_t rows;
  int64_t columns;
};

inline Extents computed_extents(const KernelConfig& config, const ChoiceInput& input) {
  if (swaps_operands(config, input.major_a, input.major_b, input.m, input.n)) {
    return {input.n, input.m};
  }
  return {input.m, input.n};
}

// Returns the number of cluster tiles in all batches, with k in `splits` parts.
inline int64_t cluster_tiles(const KernelConfig& config, const ChoiceInput& input, int splits) {
  const Extents extents = computed_extents(config, input);
  return ceil_div(extents.rows, config.output_m() * config.cluster_m) *
         ceil_div(extents.columns, config.output_n() * config.cluster_n) * input.batch * splits;
}

// Returns the bytes of a stage that a block requests from L2; other blocks of its cluster load the
// rest.
inline double asked_bytes(const KernelConfig& config) {
  return static_cast<double>(config.operand_bytes(config.tile_m)) / config.cluster_n +
         static_cast<double>(config.operand_bytes(config.tile_n)) / config.cluster_m;
}

// Returns the cost of these requests, in bytes of rows that begin at lines.
inline double asked_cost(const KernelConfig& config, const ChoiceInput& input) {
  const bool swap_ab = swaps_operands(config, input.major_a, input.major_b, input.m, input.n);
  const auto cost = [&](int extent, int sharers, int alignment) {
    const double factor = alignment >= 64   ? 1.0
                          : alignment >= 32 ? kSectorFactor
                                            : kHalfSectorFactor;
    return factor * config.operand_bytes(extent) / sharers;
  };
  const int a = swap_ab ? input.row_alignment_b : input.row_alignment_a;
  const int b = swap_ab ? input.row_alignment_a : input.row_alignment_b;
  return cost(config.tile_m, config.cluster_n, a) + cost(config.tile_n, config.cluster_m, b);
}

// Combines limits: those that are close to one another take longer together.
inline double power_mean(std::span<const double> limits, double power = 8.0) {
  double sum = 0.0;
  for (const double limit : limits) sum += std::pow(limit, power);
  return std::pow(sum, 1.0 / power);
}

}  // namespace jax_tcgemm::sm90

#endif  // JAX_TCGEMM_DISPATCH_SM90_MODEL_PARTS_H_
