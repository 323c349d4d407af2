// The constants were fitted to measurements on an H200 (docs/performance.md); only their ratios
// matter.

#include "heuristic.h"

#include <algorithm>

namespace jax_tcgemm {
namespace {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Cycles one mma.sync keeps a quarter of an SM busy, and the latency of a step of 32 bytes of k
// that a lone warp cannot hide: from shared memory to registers to the tensor cores.
constexpr double kMmaCycles = 6.9;
constexpr double kStepLatency = 90.0;
// Filling the ring, and writing one element of D; a second block on the SM hides part of the
// latter.
constexpr double kFillCycles = 1500.0;
constexpr double kElementCyclesAlone = 0.27;
constexpr double kElementCyclesShared = 0.18;
// The barrier of a k-tile.
constexpr double kBarrierCycles = 20.0;
// Shared memory carries each operand in once for a tile and out once for each warp: the sum of the
// reciprocal extents of both at which its bandwidth equals the tensor cores'.
constexpr double kBalancedTraffic = 0.043;
// Realigning operands in registers costs more than the products.
constexpr double kRealignFactor = 2.5;

int blocks_per_sm(const KernelConfig& config, const ChoiceInput& input) {
  const int by_memory = input.shared_memory_per_block / config.shared_memory_bytes();
  return std::clamp(by_memory, 1, 8 * 32 / std::min(256, config.threads()));
}

// Cycles of one step of 32 bytes of k with `blocks` blocks on an SM.
double step_cycles(const KernelConfig& config, int64_t blocks) {
  const double mma = config.warp_m() / 16.0 * config.warp_n() / 8.0;
  const double traffic =
      1.0 / config.warp_m() + 1.0 / config.warp_n() + 1.0 / config.tile_m + 1.0 / config.tile_n;
  const double warp = kMmaCycles * mma * std::max(1.0, traffic / kBalancedTraffic);
  const double warps = static_cast<double>(ceil_div(blocks * config.threads() / 32, 4));
  const double cycles = std::max(kStepLatency + warp, warp * warps);
  return config.loader == Loader::kRealign ? kRealignFactor * cycles : cycles;
}

double tensor_core_cycles(const KernelConfig& config, const ChoiceInput& input, int64_t tiles) {
  const int64_t resident = blocks_per_sm(config, input);
  const int64_t tiles_per_sm = ceil_div(tiles, input.sm_count);
  const int64_t k_tiles = ceil_div(input.k, config.tile_k);
  const int64_t steps = k_tiles * config.tile_k * element_bytes(config.algorithm) / 32;
  const auto round = [&](int64_t blocks) {
    const double element = blocks > 1 ? kElementCyclesShared : kElementCyclesAlone;
    return kFillCycles + element * config.tile_m * config.tile_n * blocks +
           k_tiles * kBarrierCycles + steps * step_cycles(config, blocks);
  };
  const int64_t rest = tiles_per_sm % resident;
  return tiles_per_sm / resident * round(resident) + (rest > 0 ? round(rest) : 0.0);
}

// A trip to memory for every tile_k steps; the loads of an SM's blocks queue behind one another.
double simt_cycles(const KernelConfig& config, const ChoiceInput& input, int64_t tiles) {
  constexpr double kTripCycles = 700.0;
  const int64_t blocks = ceil_div(tiles, input.sm_count);
  const double loads = 2.0 * config.tile_k * config.threads() / 32 * blocks;
  return ceil_div(input.k, config.tile_k) * (kTripCycles + loads);
}

}  // namespace

bool supports(const KernelConfig& config, const ChoiceInput& input) {
  return config.algorithm == input.algorithm &&
         (input.aligned || config.loader != Loader::kCpAsync) &&
         config.shared_memory_bytes() <= input.shared_memory_per_block;
}

bool suits(const KernelConfig& config, const ChoiceInput& input) {
  const bool wants = input.float32_result && (input.algorithm == Algorithm::kBf16Bf16F32 ||
                                              input.algorithm == Algorithm::kF16F16F32);
  return config.loader == Loader::kDirect || config.promote == wants;
}

double estimated_cycles(const KernelConfig& config, const ChoiceInput& input) {
  const int64_t tiles =
      ceil_div(input.m, config.tile_m) * ceil_div(input.n, config.tile_n) * input.batch;
  return config.loader == Loader::kDirect ? simt_cycles(config, input, tiles)
                                          : tensor_core_cycles(config, input, tiles);
}

}  // namespace jax_tcgemm
