// benchmarks/fit_times.py fits the weights to times of rows on an H200 and an H100
// (benchmarks/time_rows.cc). A float16 row has the weights of the same bfloat16 row.

#include "dispatch/time_correction.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>

#include "common/ceil_div.h"

namespace jax_tcgemm {
namespace {

struct RowWeights {
  std::string_view name;
  TimeTerms weights;
};

// Sorted by name.
constexpr RowWeights kRowWeights[] = {
#include "dispatch/time_weights.inc"
};

// The largest logarithm of a correction.
constexpr double kMostCorrection = 0.5;

// Limits of the timed products: multiplications, bytes of the operands and of D, and k. Other
// products keep the model's times.
struct TimedSizes {
  double most_products;
  double most_bytes;
  int64_t most_k;
};
constexpr double kLeastProducts = 2e6;
constexpr TimedSizes kTimed{6e10, 200e6, 8192};
constexpr TimedSizes kTimedOfFewRows{1.4e11, 2e9, 32768};

// Terms stay within the range of most timed products.
constexpr double kMostLogCycles = 13.0;
constexpr double kMostLogExtent = 14.0;
constexpr double kMostLogK = 15.0;
constexpr double kMostLogWaves = 5.0;

const TimeTerms* find_weights(std::string name, bool has_few) {
  constexpr std::string_view kHalf = "_f16_";
  if (const size_t at = name.find(kHalf); at != std::string::npos) {
    name.replace(at, kHalf.size(), "_bf16_");
  }
  if (has_few) name += "/few";
  const auto found = std::lower_bound(
      std::begin(kRowWeights), std::end(kRowWeights), name,
      [](const RowWeights& row, const std::string& key) { return row.name < key; });
  return found != std::end(kRowWeights) && found->name == name ? &found->weights : nullptr;
}

const TimeTerms* weights_of(const KernelEntry& entry, bool has_few) {
  thread_local std::map<std::pair<const KernelEntry*, bool>, const TimeTerms*> known;
  const auto [found, is_fresh] = known.try_emplace({&entry, has_few});
  if (is_fresh) found->second = find_weights(entry.name, has_few);
  return found->second;
}

}  // namespace

bool has_timed_kin(const ChoiceInput& input) {
  const bool is_function = input.compiled && !input.has_few_rows();
  const bool is_kin = input.compute_capability == 90 && !is_function && !input.gated &&
                      input.grouped == Grouped::kNone && !input.of_planes && !input.pairs &&
                      input.tma_addressable && input.d_by_tma;
  const double m = static_cast<double>(input.m), n = static_cast<double>(input.n);
  const double k = static_cast<double>(input.k), batch = static_cast<double>(input.batch);
  const double products = m * n * k * batch;
  const double bytes = (m * k + k * n + m * n) * batch * element_bytes(input.algorithm);
  const TimedSizes& timed = input.has_few_rows() ? kTimedOfFewRows : kTimed;
  return is_kin && kLeastProducts <= products && products <= timed.most_products &&
         bytes <= timed.most_bytes && input.k <= timed.most_k;
}

TimeTerms time_terms(const KernelConfig& config, const ChoiceInput& input, int splits,
                     double cycles) {
  const auto tiles = [&](int64_t rows, int64_t columns) {
    return ceil_div(rows, int64_t{config.tile_m}) * ceil_div(columns, int64_t{config.output_n()});
  };
  int64_t blocks = tiles(input.m, input.n);
  if (config.skinny || config.swap_ab) blocks = std::min(blocks, tiles(input.n, input.m));
  blocks *= input.batch * splits * config.split_k;
  const double waves = static_cast<double>(blocks) / input.sm_count;
  const auto log2 = [](double value, double most) { return std::min(std::log2(value), most); };
  const double log_cycles = std::min(std::log(cycles), kMostLogCycles);
  const double log_k = log2(static_cast<double>(input.k), kMostLogK);
  const double shorter = static_cast<double>(std::min(input.m, input.n));
  const double is_split = splits > 1 ? 1.0 : 0.0;
  const double results = static_cast<double>(input.m) * static_cast<double>(input.n);
  return {1.0,
          log_cycles,
          log_cycles * log_cycles,
          log_k,
          log_k * log_k,
          std::max(0.0, 5.0 - log_k),
          log2(static_cast<double>(input.m), kMostLogExtent),
          log2(static_cast<double>(input.n), kMostLogExtent),
          log2(std::max(waves, 0.01), kMostLogWaves),
          std::log(std::ceil(waves) / waves),
          std::min(waves, 2.0),
          input.epilogue == EpilogueWork::kSum ? 1.0 : 0.0,
          input.epilogue == EpilogueWork::kAny ? 1.0 : 0.0,
          input.major_a == Major::kMn ? 1.0 : 0.0,
          input.major_b == Major::kK ? 1.0 : 0.0,
          shorter > 16 ? 1.0 : 0.0,
          shorter > 32 ? 1.0 : 0.0,
          shorter > 64 ? 1.0 : 0.0,
          is_split,
          std::log2(static_cast<double>(splits)),
          is_split * std::log2(results * static_cast<double>(input.batch)),
          input.epilogue == EpilogueWork::kAny ? is_split : 0.0};
}

double time_correction(const KernelEntry& entry, const ChoiceInput& input, int splits,
                       double cycles) {
  const TimeTerms* const weights = weights_of(entry, input.has_few_rows());
  if (weights == nullptr || !has_timed_kin(input)) return 1.0;
  const TimeTerms terms = time_terms(entry.config, input, splits, cycles);
  const double logarithm = std::inner_product(terms.begin(), terms.end(), weights->begin(), 0.0);
  return std::exp(std::clamp(logarithm, -kMostCorrection, kMostCorrection));
}

}  // namespace jax_tcgemm
