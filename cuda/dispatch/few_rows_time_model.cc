// The constants were fitted to measurements on H100s, those of 8 bits on an H200
// (docs/performance.md); only their ratios matter.

#include "dispatch/few_rows_time_model.h"

#include <stdint.h>

#include <algorithm>

#include "common/ceil_div.h"
#include "dispatch/sm90_model_parts.h"

namespace jax_tcgemm::sm90 {
namespace {

// Of the skinny rows, which stream an operand.
namespace skinny_model {
constexpr double kStartCycles = 1960.0;  // all that is none of the following
constexpr double kClusterStartCycles = 1400.0;
constexpr double kRoundCycles = 7470.0;  // a block's next tile
constexpr double kMemoryRate = 2600.0;   // of the longer operand
constexpr double kSharedRate = 3880.0;   // of the other, which every block reads from L2
constexpr double kSmRate = 53.9;         // of both into one SM
constexpr double kLatencyCycles = 1020.0;
constexpr double kElementCycles = 0.381;
// Of an epilogue: of a line of it, and of any, whose code is fetched from afar.
constexpr double kSumCycles = 300.0;
constexpr double kFusedCycles = 1030.0;
}  // namespace skinny_model

// Of the rows that stream B of 8 bits.
namespace streamed_model {
constexpr double kStartCycles = 2390.0;
constexpr double kPartCycles = 1200.0;  // for each further block that shares k
constexpr double kRoundCycles = 4390.0;
constexpr double kMemoryRate = 2230.0;
constexpr double kAgainShare = 0.31;  // of bytes that other tiles have brought to L2
constexpr double kStageCycles = 381.0;
constexpr double kConvertCycles = 224.0;  // of floats
constexpr double kPower = 6.0;
}  // namespace streamed_model

}  // namespace

// The limits are memory, the SMs, and what the rings keep on its way; round after round.
double skinny_cycles(const KernelConfig& config, const ChoiceInput& input) {
  using namespace skinny_model;
  const int64_t capacity = concurrent_clusters(config, input);
  const double stages = ceil_div(input.k, config.tile_k) / static_cast<double>(config.split_k);
  const double streamed = stages * config.operand_bytes(config.tile_m);
  const double loaded = stages * config.stage_bytes();
  const double into_sm = stages * asked_cost(config, input) / kSmRate;
  double cycles =
      kStartCycles + (config.split_k > 1 ? kClusterStartCycles : 0.0) +
      kElementCycles * config.blocks_on_sm() * config.tile_m * config.tile_n / config.split_k;
  const auto round = [&](int64_t clusters) {
    const double blocks = static_cast<double>(clusters * config.cluster_size());
    const double sms = std::min<double>(blocks, input.sm_count);
    const double limits[] = {blocks * (streamed / kMemoryRate + (loaded - streamed) / kSharedRate),
                             blocks * into_sm / sms, kLatencyCycles * loaded / config.ring_bytes()};
    return power_mean(limits);
  };
  const int64_t tiles = cluster_tiles(config, input, 1);
  const int64_t rounds = ceil_div(tiles, capacity);
  if (input.epilogue != EpilogueWork::kNone) {
    const bool is_line = input.epilogue == EpilogueWork::kSum && !input.has_c;
    cycles += is_line ? kSumCycles : kFusedCycles;
  }
  cycles += (rounds - 1) * (round(capacity) + kRoundCycles);
  return cycles + round(tiles - (rounds - 1) * capacity);
}

// Rounds of blocks, which memory limits or what a stage takes on an SM.
double streamed_cycles(const KernelConfig& config, const ChoiceInput& input) {
  using namespace streamed_model;
  const int64_t tiles = cluster_tiles(config, input, 1);
  const int64_t capacity = concurrent_clusters(config, input);
  const int64_t rounds = ceil_div(tiles, capacity);
  const bool converts = arithmetic_of(config.algorithm).accumulator != ElementType::kS32;
  const double stage = kStageCycles + (converts ? kConvertCycles : 0.0);
  const double stages =
      (input.gated ? 2.0 : 1.0) * ceil_div(input.k, config.tile_k) / config.split_k;
  const double first = 1.0 / static_cast<double>(ceil_div(input.m, config.tile_m));
  const double stage_bytes =
      config.output_n() * config.tile_k * (first + kAgainShare * (1.0 - first));
  const auto round = [&](int64_t clusters) {
    const double blocks = static_cast<double>(clusters * config.split_k);
    const double limits[] = {blocks * stages * stage_bytes / kMemoryRate,
                             stages * stage * std::max(1.0, blocks / input.sm_count)};
    return power_mean(limits, kPower) + kRoundCycles;
  };
  return kStartCycles + kPartCycles * (config.split_k - 1) + (rounds - 1) * round(capacity) +
         round(tiles - (rounds - 1) * capacity);
}

}  // namespace jax_tcgemm::sm90
