#include "dispatch/choice.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <numeric>
#include <set>
#include <string>
#include <system_error>
#include <unordered_map>
#include <utility>

#include "dispatch/sm90_time_model.h"
#include "dispatch/time_correction.h"
#include "kernel_registry.inc"

namespace jax_tcgemm {
namespace {

// Follows a row's name if the row splits k.
constexpr std::string_view kSplits = "/splits=";

// Hashes extents and layout; the other members of the input take few values.
struct ChoiceInputHash {
  size_t operator()(const ChoiceInput& input) const {
    const int64_t layout =
        2 * static_cast<int64_t>(input.major_a) + static_cast<int64_t>(input.major_b);
    size_t hash = 0;
    for (const int64_t part : {input.m, input.n, input.k, input.batch, layout}) {
      hash = (hash ^ static_cast<size_t>(part)) * 0x9e3779b97f4a7c15u;
      hash ^= hash >> 32;
    }
    return hash;
  }
};

// Factor on the expected time of a kernel that has to be compiled first: a kernel that is hardly
// faster than the build's is not worth the wait.
constexpr double kRunTimeFactor = 1.02;

// Checks if the build has the kernel that a row needs for the problem. The kernel that adds up
// parts of k has every epilogue.
bool is_built(const KernelEntry& entry, const ChoiceInput& input, int splits, bool has_fixup) {
  if (input.compiled || !entry.is_built) return false;
  return (splits > 1 && !has_fixup) || has_epilogue(entry.built_config(), input);
}

// Checks if a row can compute the problem with k in `splits` parts; 1 means that k is not split.
bool can_take(const KernelEntry& entry, const ChoiceInput& input, int splits, Choice* choice) {
  const KernelConfig& config = entry.config;
  if (!supports(config, input, splits)) return false;
  if (splits > 1 && !supports_splits(config, input, splits)) return false;
  const bool has_fixup = sm90::has_fixup(config, input, splits);
  *choice = {&entry, splits, has_fixup, is_built(entry, input, splits, has_fixup)};
  return choice->is_built || input.compiled || input.run_time_rows;
}

// Returns the number of parts to try after `splits`: twice as many, or up to 4 numbers to each
// doubling.
int next_splits(int splits, bool dense) {
  const int step = dense ? static_cast<int>(std::bit_floor(static_cast<unsigned>(splits))) / 4 : 0;
  return dense ? splits + std::max(1, step) : 2 * splits;
}

// Only rows that the model puts within this factor of the best row were timed. The second factor is
// for products of few rows. Other rows have no times but the model's.
constexpr double kTimedFactor = 1.5;
constexpr double kTimedFactorOfFew = 2.5;

// The model's own choice stays unless a correction finds another row to be faster by this factor.
// Among products that the weights were not fitted to, the corrections then make one in thirty
// slower by more than 3 % and one in nine faster. Without this factor, they make one in nine slower
// and one in six faster.
constexpr double kLeastGain = 1.06;

// A function takes less time than a store of 16-bit results in skinny rows whose blocks share k
// (lab/epilogues.md).
constexpr double kSharedFunctionFactor = 0.94;

// Factors on the expected time of a function in a skinny row, and in a row whose blocks add up
// parts of k. With them, the choices for 90 random products of 24 to 1024 rows lose 2.6 % in the
// mean of what the best row takes, and 3.8 % without them (lab/epilogues.md).
constexpr double kSkinnyFunctionFactor = 1.15;
constexpr double kAddedPartsFactor = 0.95;

// 8-bit sums that are promoted have none: see _check_skinny of jax_tcgemm/kernels/checks.py.
bool has_skinny_rows(Algorithm algorithm) {
  const int bytes = element_bytes(algorithm);
  return bytes == 2 || (bytes == 1 && !arithmetic_of(algorithm).promotes);
}

void correct(const ChoiceInput& input, std::vector<Estimate>* estimates) {
  const auto of_run_time = [&](const Choice& choice) {
    return choice.is_built || input.compiled ? 1.0 : kRunTimeFactor;
  };
  Estimate* own = nullptr;
  double least = std::numeric_limits<double>::infinity();
  for (Estimate& estimate : *estimates) {
    estimate.cycles *= of_run_time(estimate.choice);
    if (estimate.cycles < least) least = estimate.cycles, own = &estimate;
  }
  const double limit = least * (input.has_few_rows() ? kTimedFactorOfFew : kTimedFactor);
  for (auto& [choice, cycles] : *estimates) {
    if (cycles > limit) continue;
    const double modelled = cycles / of_run_time(choice);
    const KernelConfig& config = choice.entry->config;
    const ChoiceInput given = as_modelled(input, config);
    cycles *= time_correction(*choice.entry, given, choice.splits, modelled);
    const bool is_shared = config.skinny && config.split_k > 1;
    if (input.compiled && is_shared && input.has_few_rows()) cycles *= kSharedFunctionFactor;
    if (input.compiled && element_bytes(input.algorithm) == 2) {
      if (config.skinny) cycles *= kSkinnyFunctionFactor;
      if (choice.has_fixup) cycles *= kAddedPartsFactor;
    }
  }
  const bool is_plain = !input.compiled;  // the factor was found with built epilogues
  if (own != nullptr && is_plain && has_timed_kin(input)) own->cycles /= kLeastGain;
}

bool is_faster(const Estimate& x, const Estimate& y) { return x.cycles < y.cycles; }

Choice fastest_kernel(const ChoiceInput& input) {
  std::vector<Estimate> estimates = modelled_choices(input, false);
  correct(input, &estimates);
  const auto best = std::min_element(estimates.begin(), estimates.end(), is_faster);
  return best == estimates.end() ? Choice() : best->choice;
}

// Reads "ROW" or "ROW/splits=N". Returns false if `config` is neither.
bool read_config(std::string_view config, std::string_view* row, int* splits) {
  *splits = 1;
  *row = config.substr(0, config.find('/'));
  if (row->size() == config.size()) return true;
  const std::string_view number = config.substr(row->size());
  if (!number.starts_with(kSplits)) return false;
  const char* const end = config.data() + config.size();
  const auto read = std::from_chars(number.data() + kSplits.size(), end, *splits);
  return read.ec == std::errc() && read.ptr == end && *splits > 1;
}

// Returns the choice named `config`, or none if there is none that can compute the problem.
Choice named_choice(std::string_view config, const ChoiceInput& input) {
  std::string_view name;
  int splits = 1;
  if (config.empty() || !read_config(config, &name, &splits) || splits > max_splits(input)) {
    return {};
  }
  const auto rows = kernel_registry();
  const auto found = std::find_if(rows.begin(), rows.end(),
                                  [&](const KernelEntry& row) { return row.name == name; });
  Choice choice;
  return found != rows.end() && can_take(*found, input, splits, &choice) ? choice : Choice();
}

// Keeps the rows with room for an epilogue; see compiled_choices.
std::vector<Estimate> with_room(std::vector<Estimate> ranked, int64_t warp_bytes,
                                int64_t result_bytes) {
  const auto warp_room = [](const Estimate& estimate) {
    return estimate.choice.entry->config.warp_buffer_bytes();
  };
  const auto lacks_room = [&](const Estimate& estimate) {
    return !estimate.choice.entry->config.skinny && warp_room(estimate) < result_bytes;
  };
  const auto has_room = [&](const Estimate& estimate) {
    const bool stages = estimate.choice.entry->config.stages_operands();
    return !stages || warp_room(estimate) >= warp_bytes;
  };
  std::erase_if(ranked, lacks_room);
  if (std::any_of(ranked.begin(), ranked.end(), has_room))
    std::erase_if(ranked, std::not_fn(has_room));
  return ranked;
}

bool is_logging() {
  static const bool enabled = [] {
    const char* value = std::getenv("JAX_TCGEMM_LOG");
    return value != nullptr && std::string_view(value) == "1";
  }();
  return enabled;
}

}  // namespace

ChoiceInput as_modelled(ChoiceInput input, const KernelConfig& config) {
  const bool is_dense = !input.gated && input.grouped == Grouped::kNone;
  const bool is_small = is_dense && has_skinny_rows(input.algorithm) && input.has_few_rows();
  const bool has_small_tiles = config.tile_m == 64 || config.tile_m * config.tile_n <= 128 * 16;
  if (input.compiled && is_small && config.skinny && has_small_tiles) {
    input.epilogue = EpilogueWork::kNone;
  }
  return input;
}

std::span<const KernelEntry> kernel_registry() { return kKernelEntries; }

Choice choose_kernel(const ChoiceInput& input) {
  // The model takes some microseconds for each call, so its answers are cached.
  constexpr size_t kMostKept = 4096;
  thread_local std::unordered_map<ChoiceInput, Choice, ChoiceInputHash> kept;
  if (const auto found = kept.find(input); found != kept.end()) return found->second;
  if (kept.size() >= kMostKept) kept.clear();
  return kept[input] = fastest_kernel(input);
}

std::vector<Estimate> modelled_choices(const ChoiceInput& input, bool dense_splits) {
  std::vector<Estimate> estimates;
  Rank best_rank = Rank::kFallback;
  const int most_splits = max_splits(input);
  for (const KernelEntry& entry : kernel_registry()) {
    const Rank rank = rank_of(entry.config, input);
    if (rank < best_rank) continue;
    const ChoiceInput modelled = as_modelled(input, entry.config);
    for (int splits = 1; splits <= most_splits; splits = next_splits(splits, dense_splits)) {
      Choice choice;
      if (!can_take(entry, input, splits, &choice)) continue;
      if (rank > best_rank) estimates.clear();
      best_rank = rank;
      estimates.push_back({choice, estimated_cycles(entry.config, modelled, splits)});
    }
  }
  return estimates;
}

std::vector<Estimate> ranked_choices(const ChoiceInput& input, bool dense_splits) {
  std::vector<Estimate> ranked = modelled_choices(input, dense_splits);
  correct(input, &ranked);
  std::stable_sort(ranked.begin(), ranked.end(), is_faster);
  return ranked;
}

std::vector<Estimate> compiled_choices(std::string_view config, const ChoiceInput& input,
                                       bool dense_splits, int64_t warp_bytes,
                                       int64_t result_bytes) {
  if (const Choice named = named_choice(config, input); named.entry != nullptr) {
    const auto row = with_room({{named, 0}}, warp_bytes, result_bytes);
    if (!row.empty()) return row;
  }
  return with_room(ranked_choices(input, dense_splits), warp_bytes, result_bytes);
}

std::string config_of(const Choice& choice) {
  std::string config = choice.entry->name;
  if (choice.splits > 1) config.append(kSplits).append(std::to_string(choice.splits));
  return config;
}

Choice named_or_chosen(std::string_view config, const ChoiceInput& input) {
  const Choice named = named_choice(config, input);
  return named.entry != nullptr ? named : choose_kernel(input);
}

int row_alignment(const Operand& operand, Algorithm algorithm) {
  constexpr int64_t kLine = 128;
  return static_cast<int>(std::gcd(kLine, operand.ld * element_bytes(algorithm)));
}

void log_line(const std::string& text) {
  if (!is_logging()) return;
  const std::string line = "jax_tcgemm: " + text + "\n";
  thread_local std::set<std::string> seen;
  if (seen.insert(line).second) std::fputs(line.c_str(), stderr);
}

void log_choice(const GemmProblem& problem, const KernelEntry& entry) {
  if (!is_logging()) return;
  const GemmParams& p = problem.params;
  const std::string size = "m=" + std::to_string(p.m) + " n=" + std::to_string(p.n) +
                           " k=" + std::to_string(p.k) + " batch=" + std::to_string(p.batch);
  std::string_view named;
  int splits = 1;
  read_config(problem.config, &named, &splits);
  if (!named.empty() && (named != entry.name || (splits > 1) != (p.split_stages > 0))) {
    log_line(size + ": another row computes this than " + std::string(problem.config));
  }
  const std::string line =
      size + (problem.aligned() ? "" : " unaligned") +
      (p.split_stages > 0 ? " split_stages=" + std::to_string(p.split_stages) : "") +
      (p.fixup.parts > 0 ? " fixup" : "") + " -> " + entry.name;
  log_line(line);
}

}  // namespace jax_tcgemm
