// Time model of the sm75, sm80 and simt families; for the sm90 family see
// dispatch/sm90_time_model.cc. The constants were fitted to measurements on an H200
// (lab/README.md); only their ratios matter.

#include "dispatch/heuristic.h"

#include <algorithm>
#include <cmath>

#include "common/ceil_div.h"
#include "dispatch/sm90_time_model.h"
#include "shared_limits.h"
#include "sm90/output/output_tile.h"

namespace jax_tcgemm {
namespace {

// kMmaCycles: one mma.sync keeps a quarter of an SM busy for so long. kStepLatency: a lone warp
// cannot hide this latency of a step of 32 bytes of k, from shared memory to registers to the
// tensor cores.
constexpr double kMmaCycles = 6.9;
constexpr double kStepLatency = 90.0;
// Cycles to fill the ring, and to write one element of D. A second block on the SM hides part of
// the write.
constexpr double kFillCycles = 1500.0;
constexpr double kElementCyclesAlone = 0.27;
constexpr double kElementCyclesShared = 0.18;
// The barrier of a k-tile.
constexpr double kBarrierCycles = 20.0;
// Each operand enters shared memory once for a tile and leaves it once for each warp, so traffic is
// the sum of the reciprocal extents of tile and warp. At this sum, shared memory's bandwidth equals
// the tensor cores'.
constexpr double kBalancedTraffic = 0.043;
// Realigning operands in registers costs more than multiplying them.
constexpr double kRealignFactor = 2.5;
// On a GPU that has the sm90 family, these rows reach kSm90MemoryRate bytes per cycle of its
// memory, and take the following cycles.
constexpr double kSm90MemoryRate = 1300.0;
constexpr double kSm90Factor = 1.4;
constexpr double kSm90StartCycles = 1000.0;
constexpr double kSm90FusedElementCycles[] = {0.0, 0.06, 0.18};  // of each kind of epilogue

int blocks_per_sm(const KernelConfig& config, const ChoiceInput& input) {
  const int by_memory = input.shared_memory_per_block / config.shared_memory_bytes();
  return std::clamp(by_memory, 1, 8 * 32 / std::min(256, config.threads()));
}

// Returns the cycles of one step of 32 bytes of k with `blocks` blocks on an SM.
double step_cycles(const KernelConfig& config, int64_t blocks) {
  const double mma = config.warp_m() / 16.0 * config.warp_n() / 8.0;
  const double traffic =
      1.0 / config.warp_m() + 1.0 / config.warp_n() + 1.0 / config.tile_m + 1.0 / config.tile_n;
  const double warp = kMmaCycles * mma * std::max(1.0, traffic / kBalancedTraffic);
  const double warps = static_cast<double>(ceil_div(blocks * config.threads() / 32, 4));
  const double cycles = std::max(kStepLatency + warp, warp * warps);
  return config.loader == Loader::kRealign ? kRealignFactor * cycles : cycles;
}

double tensor_core_cycles(const KernelConfig& config, const ChoiceInput& input, int64_t tiles,
                          int splits) {
  const int64_t resident = blocks_per_sm(config, input);
  const int64_t tiles_per_sm = ceil_div(tiles * splits, input.sm_count);
  const int64_t k_tiles = ceil_div(ceil_div(input.k, config.tile_k), splits);
  const int64_t steps = k_tiles * config.tile_k * element_bytes(config.algorithm) / 32;
  const double fused = input.compute_capability == 90
                           ? kSm90FusedElementCycles[static_cast<int>(input.epilogue)]
                           : 0.0;
  const auto round = [&](int64_t blocks) {
    const double element = (blocks > 1 ? kElementCyclesShared : kElementCyclesAlone) + fused;
    return kFillCycles + element * config.tile_m * config.tile_n * blocks +
           k_tiles * kBarrierCycles + steps * step_cycles(config, blocks);
  };
  const int64_t rest = tiles_per_sm % resident;
  return tiles_per_sm / resident * round(resident) + (rest > 0 ? round(rest) : 0.0);
}

// Returns the cycles of the kernel that adds up parts of k, which go to memory and back.
double sum_cycles(const ChoiceInput& input, int splits) {
  constexpr double kStartCycles = 3000.0;
  constexpr double kBytesPerCycle = 200.0;  // for a small GPU; none was measured
  return splits == 1 ? 0.0 : kStartCycles + splits * 8.0 * input.m * input.n / kBytesPerCycle;
}

// Counts a trip to memory for every tile_k steps. On an H200 the trip depends on the operands'
// layout: neighbouring threads have neighbouring columns. The loads of an SM's blocks queue behind
// one another. An epilogue's code takes long to fetch.
double simt_cycles(const KernelConfig& config, const ChoiceInput& input, int64_t tiles) {
  const double a_cycles = input.major_a == Major::kMn ? 300.0 : 0.0;
  const double b_cycles = input.major_b == Major::kK ? 1000.0 : 0.0;
  const bool is_sm90 = input.compute_capability == 90;
  const double trip_cycles = is_sm90 ? 650.0 + a_cycles + b_cycles : 700.0;
  const int64_t blocks = ceil_div(tiles, input.sm_count);
  const double loads = (is_sm90 ? 3.5 : 2.0) * config.tile_k * config.threads() / 32 * blocks;
  const int products = config.gated ? 2 : 1;
  const bool fused = is_sm90 && input.epilogue != EpilogueWork::kNone;
  return products * ceil_div(input.k, config.tile_k) * (trip_cycles + loads) +
         (fused ? 3500.0 : 0.0);
}

// Returns the cycles of a direct row, the sum of:
//   - a start with its trip to memory;
//   - a further trip for each round of parts of k beyond the warps' first ones;
//   - the work of blocks and their parts on an SM, together with the bytes read and written that L2
//     does not hold.
double direct_cycles(const KernelConfig& config, const ChoiceInput& input, int64_t tiles) {
  constexpr double kStartCycles = 1040.0;
  constexpr double kColumnStartCycles = 10.0;
  // Added to the start: a bias arrives before the operands do; other epilogues' code takes long to
  // fetch.
  constexpr double kBiasStartCycles = 1200.0;
  constexpr double kAnyStartCycles = 2640.0;
  constexpr double kTripCycles = 1500.0;
  constexpr double kBlockCycles = 500.0;
  constexpr double kPartCycles = 36.0;  // as many more for each mn-major operand
  constexpr double kBytesPerCycle = 2000.0;
  constexpr double kL2Bytes = 50e6;
  // Measured on a decode step's products with caches of 16 to 256 MiB.
  constexpr double kLargeBatchBytes = 8e6;
  constexpr double kLargeBatchRate = 1300.0;
  const int64_t parts = ceil_div(input.k, config.tile_k);
  const int64_t trips = ceil_div(parts, config.split_k);
  const int transposed =
      (input.major_a == Major::kMn ? 1 : 0) + (input.major_b == Major::kMn ? 1 : 0);
  const double blocks = static_cast<double>(tiles) / input.sm_count;
  const double work = blocks * (kBlockCycles + parts * kPartCycles * (1 + transposed));
  const double elements = static_cast<double>(input.m) * input.k + input.k * input.n +
                          static_cast<double>(input.m) * input.n;
  const double bytes = elements * input.batch * element_bytes(config.algorithm);
  // Each tile reads its rows and columns, from memory if L2 does not hold them meanwhile.
  const double read = static_cast<double>(tiles) * (config.tile_m + config.tile_n) * input.k *
                      element_bytes(config.algorithm);
  const double moved = bytes > kL2Bytes ? std::max(bytes, read) : bytes;
  const bool is_line = input.epilogue <= EpilogueWork::kSum && !input.has_c;
  const double fused = input.epilogue == EpilogueWork::kNone ? 0.0
                       : is_line                             ? kBiasStartCycles
                                                             : kAnyStartCycles;
  const double start = kStartCycles + kColumnStartCycles * config.tile_n + fused;
  const bool is_large = input.batch > 1 && bytes > kLargeBatchBytes;
  const double rate = is_large ? kLargeBatchRate : kBytesPerCycle;
  return start + (trips - 1) * kTripCycles + std::hypot(work, moved / rate);
}

// Checks if an sm90 row supports the problem. wgmma exists on compute capability 9.0 alone.
bool sm90_supports(const KernelConfig& config, const ChoiceInput& input) {
  if (input.compute_capability != 90 || !input.tma_addressable) return false;
  if (config.cluster_size() > input.max_cluster_size) return false;
  if (ceil_div(input.k, config.tile_k) < config.split_k) return false;
  if (config.skinny && input.batch_rank > 1) return false;
  if (config.skinny && config.gated && input.m >= input.n) return false;  // see swaps_operands
  if (config.grouped != Grouped::kNone && !input.d_by_tma) return false;
  if (config.swap_ab) {
    return input.major_a == Major::kK && (input.compiled || !input.widens());
  }
  if (element_bytes(config.algorithm) == 2) return true;
  if (config.streams_b()) {
    return input.major_a == Major::kK && input.major_b == Major::kMn;
  }
  if (element_bytes(config.algorithm) == 1) {
    return input.major_a == Major::kK && input.major_b == Major::kK;
  }
  if (config.pairs) return input.major_a == Major::kK && input.major_b == Major::kMn;
  if (sm90::transposes_b(config, input.major_a, input.major_b)) {
    return sm90::can_transpose_b(config);
  }
  return !sm90::swaps_operands(config, input.major_a, input.major_b) || config.split_k == 1;
}

// Returns true if a float32 result would be less accurate than XLA's, because the tensor cores
// truncate sums. XLA's kernels truncate them as well. XLA is more accurate in two cases: it adds up
// parts of k if D has few tiles, and it multiplies few rows without tensor cores. For larger D its
// error equalled ours at every k that was measured (lab/README.md). Nobody has measured GPUs
// other than Hopper's.
bool wants_promotion(const ChoiceInput& input) {
  // The algorithm's name says in which of two ways 8-bit products are added up.
  if (element_bytes(input.algorithm) == 1) return arithmetic_of(input.algorithm).promotes;
  if (!input.widens() || !arithmetic_of(input.algorithm).promotes) return false;
  if (input.compute_capability != 90 || input.grouped != Grouped::kNone) return true;
  constexpr int64_t kLongestMeasured = 8192;
  constexpr int64_t kLargeTile = 128 * 256;
  if (input.has_few_rows() || input.k > kLongestMeasured) return true;
  return 4 * input.batch * input.m * input.n < 3 * input.sm_count * kLargeTile;
}

// Checks if a grid with one tile a block is not too large.
bool fits_grid(const KernelConfig& config, const ChoiceInput& input) {
  return input.batch <= kMaxGridRows && ceil_div(input.m, config.tile_m) <= kMaxGridRows;
}

// Checks if a row takes an epilogue that is compiled at run time: see epilogue/compiled_output.cuh
// and sm90/output/skinny_function.cuh. Blocks that share 16 x 16 results cannot reduce them.
bool takes_compiled_epilogue(const KernelConfig& config, bool reduces) {
  if (config.arch == Arch::kSm80) {
    const bool has_float32_sums = arithmetic_of(config.algorithm).accumulator == ElementType::kF32;
    return config.loader == Loader::kCpAsync && has_float32_sums && !config.pairs;
  }
  if (config.arch != Arch::kSm90 || config.planes || config.pairs ||
      config.grouped == Grouped::kK) {
    return false;
  }
  if (config.skinny) return !reduces || config.tile_n / config.split_k % 16 == 0;
  // Functions of one weight promote sums in skinny rows alone: the other rows that promote take up
  // to 1.4 times as long (lab/precision.md).
  const bool is_slow = config.promote && !config.gated && element_bytes(config.algorithm) != 1;
  return !is_slow && (config.split_k == 1 || config.streams_b()) && config.output_n() % 32 == 0;
}

// Checks if a row can compute products over parts of k.
bool splits_k(const KernelConfig& config) {
  const bool is_of_family = config.arch == Arch::kSm75 || config.arch == Arch::kSm90;
  const bool is_special = config.planes || config.pairs || config.gated || config.skinny ||
                          config.swap_ab || config.grouped != Grouped::kNone;
  return is_of_family && !is_special && config.split_k == 1 &&
         !arithmetic_of(config.algorithm).at_run_time;
}

}  // namespace

RowFacts facts_of(const KernelConfig& config) {
  const bool has_buffers =
      (config.arch == Arch::kSm90 || takes_compiled_epilogue(config, false)) && !config.skinny;
  return {.splits_k = splits_k(config),
          .adds_parts = config.has_fixup(),
          .takes_functions = takes_compiled_epilogue(config, false),
          .takes_reductions = takes_compiled_epilogue(config, true),
          .warp_buffer_bytes = has_buffers ? config.warp_buffer_bytes() : 0,
          .shared_memory_bytes = config.shared_memory_bytes()};
}

ElementType d_type_for_function(const ChoiceInput& input, bool shows_sums) {
  // Hopper's rows that promote the sums of many rows take no functions.
  const bool has_rows = input.compute_capability != 90 || input.has_few_rows();
  const bool may_promote = input.gated || (input.grouped == Grouped::kNone && has_rows);
  const bool promotes = shows_sums && may_promote && element_bytes(input.algorithm) == 2;
  return promotes ? ElementType::kF32 : arithmetic_of(input.algorithm).output;
}

// finish_of (sm90/tma_descriptor.cc) decides which of these epilogues an sm90 kernel runs.
bool has_epilogue(const KernelConfig& config, const ChoiceInput& input) {
  if (config.epilogue == EpilogueWork::kAny) return true;
  if (config.arch != Arch::kSm90) return input.epilogue <= config.epilogue;
  if (config.skinny) return input.epilogue <= config.epilogue && !input.has_c;
  const bool swaps = sm90::swaps_operands(config, input.major_a, input.major_b);
  if (!input.d_by_tma) {
    return !swaps && input.epilogue != EpilogueWork::kAny && !input.has_c;
  }
  if (input.epilogue == EpilogueWork::kNone) return true;
  const bool has_c_too = !swaps && input.c_by_tma;
  const bool has_sums = config.epilogue == EpilogueWork::kSum &&
                        (config.swap_ab || (config.unrolls_sums() && !swaps));
  return has_sums && input.epilogue == EpilogueWork::kSum && !input.widens() &&
         (!input.has_c || has_c_too);
}

bool supports(const KernelConfig& config, const ChoiceInput& input, int splits) {
  if (!input.compiled && arithmetic_of(config.algorithm).at_run_time) return false;
  if (input.compiled) {
    if (!takes_compiled_epilogue(config, input.reduces)) return false;
    if (splits > 1 && !sm90::has_fixup(config, input, splits)) return false;
  } else if (splits == 1 && !has_epilogue(config, input)) {
    return false;  // where k is split, the kernel that adds up the parts has every epilogue
  }
  if (input.of_planes != config.planes || input.pairs != config.pairs) return false;
  if (config.algorithm != input.algorithm || config.gated != input.gated ||
      config.grouped != input.grouped ||
      config.shared_memory_bytes() > input.shared_memory_per_block) {
    return false;
  }
  if (config.arch == Arch::kSm90) return sm90_supports(config, input);
  if (config.arch == Arch::kSm80 && input.compute_capability < 80) return false;
  if (config.pairs && input.epilogue != EpilogueWork::kNone) return false;
  if (config.is_direct()) return input.aligned && fits_grid(config, input);
  const bool any_address = config.loader == Loader::kRealign || config.loader == Loader::kDirect;
  return input.aligned || any_address;
}

Rank rank_of(const KernelConfig& config, const ChoiceInput& input) {
  if (config.is_fallback()) return Rank::kFallback;
  // These rows are taken by name alone: sm75 rows where later instructions exist, sm80 rows with a
  // function where sm90 rows take it, direct rows and skinny 8-bit rows where nobody has timed
  // them.
  if (config.arch == Arch::kSm75 && input.compute_capability >= 80) return Rank::kFallback;
  if (config.arch == Arch::kSm80 && input.compiled && input.compute_capability == 90) {
    return Rank::kFallback;
  }
  if (config.is_direct() && input.compute_capability != 90) return Rank::kFallback;
  if (config.skinny && element_bytes(config.algorithm) == 1 && !input.has_few_rows()) {
    return Rank::kFallback;
  }
  // Promotion costs time if the result does not need it, except in rows for little work.
  const bool takes_both = config.promote && (config.skinny || config.is_direct());
  const bool suits = config.promote == wants_promotion(input) || takes_both || config.planes;
  return config.arch == Arch::kSimt || suits ? Rank::kAccurate : Rank::kRough;
}

int max_splits(const ChoiceInput& input) {
  // The kernel that adds up the parts has a row of its grid for each row of D.
  if (input.batch != 1 || input.n % kVectorColumns != 0 || input.m > kMaxGridRows) return 1;
  const int64_t result = std::max<int64_t>(1, 4 * input.m * input.n);
  return static_cast<int>(std::clamp<int64_t>(input.workspace_bytes / result, 1, kMostSplits));
}

bool supports_splits(const KernelConfig& config, const ChoiceInput& input, int splits) {
  const int64_t k_tiles = ceil_div(input.k, config.tile_k);
  // In pingpong each consumer skips as many stages for the other's tile as its own tile has.
  const bool even = config.schedule == Schedule::kCooperative || k_tiles % splits == 0 ||
                    sm90::has_fixup(config, input, splits);
  return splits_k(config) && even && input.batch == 1 && k_tiles >= splits;
}

double estimated_cycles(const KernelConfig& config, const ChoiceInput& input, int splits) {
  if (config.arch == Arch::kSm90) return sm90::estimated_cycles(config, input, splits);
  const int64_t tiles =
      ceil_div(input.m, config.tile_m) * ceil_div(input.n, config.output_n()) * input.batch;
  if (config.arch == Arch::kSimt) return simt_cycles(config, input, tiles);
  if (config.is_direct()) return direct_cycles(config, input, tiles);
  const double cycles =
      tensor_core_cycles(config, input, tiles, splits) + sum_cycles(input, splits);
  if (input.compute_capability != 90) return cycles;
  // The model of the sm80 family leaves memory out, so its times are too short.
  const double traffic =
      static_cast<double>(element_bytes(config.algorithm)) * input.batch *
      (static_cast<double>(input.m) * input.k + input.k * input.n + input.m * input.n);
  return std::max(kSm90Factor * cycles + kSm90StartCycles, traffic / kSm90MemoryRate);
}

}  // namespace jax_tcgemm
