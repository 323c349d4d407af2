// The constants were fitted to measurements on H100s and partly on an H200 (lab/README.md);
// only their ratios matter.

#include "dispatch/sm90_time_model.h"

#include <algorithm>
#include <cmath>

#include "common/ceil_div.h"
#include "dispatch/few_rows_time_model.h"
#include "dispatch/sm90_model_parts.h"
#include "sm90/output/output_tile.h"

namespace jax_tcgemm::sm90 {
namespace {

// Constants for the rows that compute tile after tile: clock cycles at about 1.75 GHz, bytes per
// cycle.
namespace pipelined_model {
constexpr double kStartCycles = 2910.0;  // barriers, descriptors, the first stage
constexpr double kClusterStartCycles = 49.6;
constexpr double kClusterBlockCycles = 5.22;  // for each block of a cluster
constexpr double kTensorFactor = 1.13;        // wgmma does not quite reach its rate
constexpr double kFewStagesFactor = 1.08;     // for fewer than 4 stages
constexpr double kTransposeFactor = 1.34;
constexpr double kPromoteFactor = 1.04;
// The least cycles of a stage if A goes through registers: for one and for two warpgroups, plus
// some for each column that a warpgroup multiplies. Two blocks on an SM hide half of each other's.
constexpr double kFragmentCycles[] = {355.0, 465.0};
constexpr double kFragmentColumnCycles = 0.471;
// The bandwidth of one SM's shared memory, and the slowdown by requests beyond it.
constexpr double kSharedMemoryPeak = 128.0;
constexpr double kContention = 0.414;
constexpr double kContentionOf8Bits = 0.5;
// Rates from L2: into all SMs, the same for 32-bit elements, and into one SM, whichever block of
// the cluster asked. kLoadPower says how much these two limits add up.
constexpr double kL2Rate = 6400.0;
constexpr double kL2Rate32 = 5000.0;
constexpr double kReceiveRate = 73.8;
constexpr double kLoadPower = 2.24;
// Rates into one SM: if few rows share weights that L2 does not hold; for 32-bit elements, if there
// are fewer rows than columns.
constexpr double kColdRowsRate = 54.7;
constexpr double kColdRowsRate32 = 46.3;
// L2 does not hold more bytes than these: of the operands; of the operands and D, which takes their
// place; of 32-bit operands that one block reads.
constexpr double kColdBytes = 44.0e6;
constexpr double kColdBytesWithD = 82.5e6;
constexpr double kColdBytes32 = 20.0e6;
constexpr double kUnsharedFactor = 1.07;    // blocks without a cluster load more, which costs power
constexpr double kReadRate = 1670.0;        // from device memory
constexpr double kWriteRate = 2100.0;       // to it
constexpr double kWrittenRowBytes = 46.9;   // each row of a cluster's tile costs as many more
constexpr double kPaddingShare = 0.321;     // of the columns beyond D, which are not written
constexpr double kPartLineShare = 0.526;    // of the lines that a tile writes in part
constexpr double kPartSectorFactor = 1.55;  // for rows that begin within sectors
constexpr double kMemorySms = 0.466;        // share of the SMs that saturates memory
constexpr double kLimitPower = 3.55;        // how much memory's and the SMs' time add up
constexpr double kAgainShare = 0.14;        // share of repeated loads from L2 that adds to memory's
// Cycles to write 2 bytes of D: for any tile, and an addition that grows with fewer warps.
constexpr double kElementCycles = 0.0786;
constexpr double kWarpElementCycles = 0.183;  // divided by the warps of a tile
// Further cycles if TMA cannot write D: in parts of rows, and by words.
constexpr double kRowElementCycles = 0.03;
constexpr double kCopiedElementCycles = 0.1;
// Cycles of an element beyond its instructions and D, if a consumer waits for its turn.
constexpr double kTurnElementCycles = 0.025;
// An epilogue's own cycles; the start fetches its code, which takes long the first time. The kSum
// constants are for an unrolled sum.
constexpr double kFusedElementCycles = 0.197;
constexpr double kFusedWarps = 8.0;  // warps of a tile for this number; fewer take longer
constexpr double kFusedStartCycles = 3380.0;
constexpr double kSumElementCycles = 0.0299;
constexpr double kSumStartCycles = 1380.0;
constexpr double kReductionCycles = 2110.0;
constexpr double kReducedElementCycles = 0.269;
// The kernel itself adds up parts of k: cycles for each part, and bytes per cycle that a block
// sends.
constexpr double kFixupPartCycles = 771.0;
constexpr double kFixupRate = 7.02;
// A second kernel adds up parts of k.
constexpr double kSumCycles = 3500.0;  // with the launch before it
constexpr double kSumSplitCycles = 8.59;
constexpr double kSumRate = 2560.0;  // bytes written and read again
}  // namespace pipelined_model

// Returns the bytes per cycle into one SM if blocks of 64 rows ask L2, almost at once, for columns
// that L2 must fetch. Returns 0 if this does not limit them.
double starved_rate(const KernelConfig& config, const ChoiceInput& input, double operand_bytes) {
  using namespace pipelined_model;
  if (config.tile_m != 64 || config.grouped != Grouped::kNone) return 0.0;
  if (element_bytes(config.algorithm) <= 2) {
    return operand_bytes > kColdBytes && input.m <= 256 ? kColdRowsRate : 0.0;
  }
  const Extents extents = computed_extents(config, input);
  const bool fewer = extents.rows < extents.columns;
  return operand_bytes > kColdBytes32 && fewer ? kColdRowsRate32 : 0.0;
}

// Returns the bytes of an element of D.
int result_bytes(const ChoiceInput& input) { return element_bytes(input.d_type); }

// Returns the cycles of one stage: the slower of tensor cores and L2. Requests beyond shared
// memory's bandwidth slow the tensor cores down (wgmma reads A once and B for every 64 rows; TMA
// writes both).
double stage_cycles(const KernelConfig& config, const ChoiceInput& input, int64_t blocks) {
  using namespace pipelined_model;
  const int bytes = element_bytes(config.algorithm);
  const double ideal = config.tile_m * config.tile_n / 32.0;
  const double stage_bytes = input.loaded_share * config.stage_bytes();
  const double shared_bytes = config.tile_m / 64.0 * (64 + config.tile_n) * 128 + stage_bytes;
  const double operand_bytes =
      input.loaded_share * static_cast<double>(bytes) * input.k * (input.m + input.n) * input.batch;
  const double d_bytes = static_cast<double>(result_bytes(input)) * input.m * input.n *
                         static_cast<double>(input.batch);
  const bool cold = operand_bytes > kColdBytes || operand_bytes + d_bytes > kColdBytesWithD;
  const double contention = bytes == 1 ? kContentionOf8Bits : kContention;
  const double excess = std::max(0.0, shared_bytes / (kSharedMemoryPeak * ideal) - 1.0);
  const double tensor = kTensorFactor * ideal * (cold ? 1.0 + contention * excess : 1.0);
  const double on_sm = std::max(1.0, static_cast<double>(blocks) / input.sm_count);
  const double asked = input.loaded_share * asked_cost(config, input);
  const double from_l2[] = {asked * blocks / (bytes == 4 ? kL2Rate32 : kL2Rate),
                            on_sm * stage_bytes / kReceiveRate};
  double cycles = std::max(on_sm * tensor, power_mean(from_l2, kLoadPower));
  if (const double rate = starved_rate(config, input, operand_bytes); rate > 0.0) {
    cycles = std::max(cycles, on_sm * stage_bytes / rate);
  }
  if (cold && config.cluster_size() == 1) cycles *= kUnsharedFactor;
  if (bytes == 4 && (input.major_a == Major::kMn || input.major_b == Major::kMn)) {
    const int warpgroups = config.consumer_warps() / 4;
    const double alone =
        kFragmentCycles[warpgroups - 1] + kFragmentColumnCycles * warpgroups * config.tile_n;
    cycles = std::max(cycles, alone * (1.0 + std::ceil(on_sm)) / 2.0);
  }
  if (transposes_b(config, input.major_a, input.major_b)) cycles *= kTransposeFactor;
  if (config.promote) cycles *= kPromoteFactor;
  return config.stages < 4 ? cycles * kFewStagesFactor : cycles;
}

struct FusedCost {
  double element = 0.0;
  double start = 0.0;
};

// Checks if a D that TMA cannot address leaves in parts of rows: see Finish::kRows.
bool leaves_by_rows(const KernelConfig& config, const ChoiceInput& input) {
  return !input.d_by_tma && input.epilogue != EpilogueWork::kAny && !input.has_c &&
         !swaps_operands(config, input.major_a, input.major_b);
}

// Returns the cost of the epilogue. Sums are unrolled if they leave by rows, or if TMA stores them
// in the type of the operands.
FusedCost fused_cost(const KernelConfig& config, const ChoiceInput& input) {
  using namespace pipelined_model;
  const bool by_rows = leaves_by_rows(config, input);
  if (input.epilogue == EpilogueWork::kNone && (input.d_by_tma || by_rows || config.split_k > 1)) {
    return {};
  }
  const bool unrolled = input.d_by_tma && input.epilogue == EpilogueWork::kSum &&
                        (config.unrolls_sums() || config.swap_ab) && !input.widens();
  if (by_rows || unrolled) return {kSumElementCycles, kSumStartCycles};
  return {kFusedElementCycles * kFusedWarps / config.warps_m, kFusedStartCycles};
}

// Returns the factor on the time to write D. These make it larger:
//   - short rows of a cluster's tile (of a block's, if the row of the table swaps operands);
//   - rows that end beyond D;
//   - lines that a block's tile writes in part;
//   - rows of D that do not begin at sectors of 32 bytes.
double width_factor(const KernelConfig& config, const ChoiceInput& input) {
  using namespace pipelined_model;
  const bool swapped = swaps_operands(config, input.major_a, input.major_b, input.m, input.n);
  const int64_t own_columns = swapped ? config.tile_m : config.output_n();
  const int sharers = config.swap_ab ? 1 : swapped ? config.cluster_m : config.cluster_n;
  const int64_t columns = own_columns * sharers;
  const double bytes = result_bytes(input);
  const double row_bytes = bytes * static_cast<double>(std::min<int64_t>(columns, input.n));
  const double padding = static_cast<double>(ceil_div(input.n, columns) * columns) / input.n - 1.0;
  const double lines = bytes * static_cast<double>(own_columns) / 128.0;
  const bool in_sectors = result_bytes(input) * input.n % 32 == 0;
  return (1.0 + kWrittenRowBytes / row_bytes) * (1.0 + kPaddingShare * padding) *
         (1.0 + kPartLineShare * (std::ceil(lines) / lines - 1.0)) *
         (in_sectors ? 1.0 : kPartSectorFactor);
}

// Returns the cycles to read the operands and to write D. All blocks together load `loaded` bytes.
// Few SMs cannot saturate memory.
double memory_cycles(const KernelConfig& config, const ChoiceInput& input, int64_t blocks,
                     double loaded) {
  using namespace pipelined_model;
  const int bytes = element_bytes(input.algorithm);
  const double read = input.loaded_share * static_cast<double>(input.batch) * bytes * input.k *
                      (input.m + (input.gated ? 2.0 : 1.0) * input.n);
  const double written = static_cast<double>(input.batch) * result_bytes(input) * input.m *
                         input.n * width_factor(config, input);
  const double asked = std::min(1.0, blocks / (kMemorySms * input.sm_count));
  return (read / kReadRate + written / kWriteRate) / asked +
         kAgainShare * std::max(0.0, loaded - read) / kL2Rate;
}

// Returns the cycles between the last instruction of a tile and its D.
double output_cycles(const KernelConfig& config, const ChoiceInput& input, int splits,
                     const FusedCost& fused) {
  using namespace pipelined_model;
  const double elements = config.tile_m * config.output_n();
  const bool is_split = splits > 1 && !has_fixup(config, input, splits);
  const double element = kElementCycles + kWarpElementCycles / config.warps_m;
  double output = element * elements * (result_bytes(input) == 4 || is_split ? 2 : 1);
  output += fused.element * elements;
  if (!input.d_by_tma && splits == 1 && config.split_k == 1) {
    output += (leaves_by_rows(config, input) ? kRowElementCycles : kCopiedElementCycles) * elements;
  }
  if (config.split_k > 1) output += kReductionCycles + kReducedElementCycles * elements;
  return output;
}

// Returns the cycles to add up the products over parts of k, which are written to L2 and read
// again.
double sum_cycles(const KernelConfig& config, const ChoiceInput& input, int splits) {
  using namespace pipelined_model;
  if (splits == 1) return 0.0;
  if (has_fixup(config, input, splits)) {
    const double sent = 4.0 * config.tile_m * config.tile_n * (splits - 1) / splits;
    return kFixupPartCycles * splits + sent / kFixupRate;
  }
  return kSumCycles + splits * (kSumSplitCycles + 8.0 * input.m * input.n / kSumRate);
}

double pipelined_cycles(const KernelConfig& config, const ChoiceInput& input, int splits) {
  using namespace pipelined_model;
  const int64_t tiles = cluster_tiles(config, input, splits);
  const int64_t capacity = concurrent_clusters(config, input);
  const int64_t rounds = ceil_div(tiles, capacity);
  const int64_t blocks = std::min(tiles, capacity) * config.cluster_size();
  const double stages =
      ceil_div(input.k, config.tile_k) / static_cast<double>(config.split_k * splits);
  const double mainloop = stages * stage_cycles(config, input, blocks);
  // Products over parts of k in a workspace have no epilogue; the kernel that adds them up has one.
  const bool finishes = splits == 1 || has_fixup(config, input, splits);
  const FusedCost fused = finishes ? fused_cost(config, input) : FusedCost();
  const double output = output_cycles(config, input, splits, fused);
  // In pingpong one tile is written while the next one is multiplied, if that takes long enough.
  const bool hidden = config.schedule == Schedule::kPingpong && rounds > 1;
  const double turn = kTurnElementCycles * config.tile_m * config.output_n();
  const double round = std::max(mainloop, (mainloop + output + turn) / 2);
  const double tensor_time = hidden ? rounds * round + output : rounds * (mainloop + output);
  const int size = config.cluster_size();
  const double start = kStartCycles + fused.start +
                       (size > 1 ? kClusterStartCycles + kClusterBlockCycles * size : 0.0);
  const double loaded =
      input.loaded_share * tiles * config.cluster_size() * stages * asked_bytes(config);
  const double limits[] = {tensor_time, memory_cycles(config, input, blocks, loaded)};
  return start + power_mean(limits, kLimitPower) + sum_cycles(config, input, splits);
}

}  // namespace

bool has_fixup(const KernelConfig& config, const ChoiceInput& input, int splits) {
  if (!config.has_fixup() || splits == 1 || splits > config.warps_m) return false;
  const bool is_fit = input.compiled ? element_bytes(input.algorithm) > 1  // the sums are float32
                                     : input.epilogue <= config.epilogue && !input.has_c &&
                                           result_bytes(input) != 4 && input.d_by_tma;
  if (!is_fit) return false;
  const int64_t clusters = cluster_tiles(config, input, splits);
  const int64_t blocks = clusters * config.cluster_size();
  return clusters <= concurrent_clusters(config, input) &&
         blocks * config.warps_m * static_cast<int64_t>(sizeof(uint64_t)) <= kFixupFlagBytes &&
         blocks * config.tile_m * config.tile_n * 4 + kFixupFlagBytes <= input.workspace_bytes;
}

double estimated_cycles(const KernelConfig& config, const ChoiceInput& input, int splits) {
  if (config.streams_b()) return streamed_cycles(config, input);
  return config.skinny ? skinny_cycles(config, input) : pipelined_cycles(config, input, splits);
}

}  // namespace jax_tcgemm::sm90
