#include "dispatch/ragged.h"

#include <algorithm>
#include <limits>

#include "common/ceil_div.h"

namespace jax_tcgemm {

int64_t most_ragged_tiles(const GemmParams& p, const KernelConfig& config) {
  const int64_t rows = config.tile_m * config.cluster_m;
  // Groups of rows: each tile has a row at least, and a group's last tile may have no more.
  const int64_t m = p.m;
  const int64_t tiles_m = config.grouped == Grouped::kM
                              ? (m + (rows - 1) * std::min<int64_t>(m, p.batch + 1)) / rows
                              : ceil_div(m, rows) * p.batch;
  return tiles_m * ceil_div(p.n, config.output_n() * config.cluster_n);
}

Status check_ragged_tiles(const GemmParams& p, const KernelConfig& config) {
  const int64_t tiles = most_ragged_tiles(p, config);
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max() / 2;
  JAX_TCGEMM_REQUIRE(tiles <= kMax && p.m <= kMax && p.k <= kMax, "m=", p.m, " n=", p.n, " k=", p.k,
                     " groups=", p.batch, " make ", tiles, " tiles");
  return Status();
}

}  // namespace jax_tcgemm
