// The constants were fitted to measurements on H100s, those of rows that stream an 8-bit B on an
// H200 (lab/README.md); only their ratios matter.

#include "dispatch/few_rows_time_model.h"

#include <stdint.h>

#include <algorithm>

#include "common/ceil_div.h"
#include "dispatch/sm90_model_parts.h"

namespace jax_tcgemm::sm90 {
namespace {

// Constants for the skinny rows, which stream an operand.
namespace skinny_model {
constexpr double kStartCycles = 1960.0;  // everything except the following
constexpr double kClusterStartCycles = 1400.0;
constexpr double kRoundCycles = 7470.0;  // a block's next tile
constexpr double kMemoryRate = 2600.0;   // of the longer operand
constexpr double kSharedRate = 3880.0;   // of the other operand, which every block reads from L2
constexpr double kSmRate = 53.9;         // of both operands into one SM
constexpr double kLatencyCycles = 1020.0;
constexpr double kElementCycles = 0.381;
// Epilogues: kSumCycles for alpha * product + bias, kFusedCycles for any other one, whose code
// takes long to fetch.
constexpr double kSumCycles = 300.0;
constexpr double kFusedCycles = 1030.0;
}  // namespace skinny_model

// Constants for the rows that stream an 8-bit B.
namespace streamed_model {
constexpr double kStartCycles = 2390.0;
constexpr double kPartCycles = 1200.0;  // for each further block that shares k
constexpr double kRoundCycles = 4390.0;
constexpr double kMemoryRate = 2230.0;
constexpr double kAgainShare = 0.31;  // for bytes that other tiles have brought to L2
constexpr double kStageCycles = 381.0;
constexpr double kConvertCycles = 224.0;  // if the sums are float32
constexpr double kPower = 6.0;
}  // namespace streamed_model

}  // namespace

// Three limits hold for each round: memory, the SMs, and the bytes that the rings keep in flight.
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

// Two limits hold for each round of blocks: memory, and the time of a stage on an SM.
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
