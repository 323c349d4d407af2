#include "dispatch/choice.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <set>
#include <string>
#include <unordered_map>

#include "dispatch/sm90_time_model.h"
#include "kernel_registry.inc"

namespace jax_tcgemm {
namespace {

// Of extents and layout; what else there is in a choice takes few values.
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

Choice fastest_kernel(const ChoiceInput& input) {
  Choice best;
  Rank best_rank = Rank::kFallback;
  const int most_splits = max_splits(input);
  double best_time = std::numeric_limits<double>::infinity();
  for (const KernelEntry& entry : kernel_registry()) {
    const Rank rank = rank_of(entry.config, input);
    for (int splits = 1; splits <= most_splits; splits *= 2) {
      if (!supports(entry.config, input, splits)) continue;
      if (splits > 1 && !supports_splits(entry.config, input, splits)) continue;
      const double time = estimated_cycles(entry.config, input, splits);
      if (rank > best_rank || (rank == best_rank && time < best_time)) {
        best = {&entry, splits, sm90::has_fixup(entry.config, input, splits)};
        best_rank = rank;
        best_time = time;
      }
    }
  }
  return best;
}

}  // namespace

std::span<const KernelEntry> kernel_registry() { return kKernelEntries; }

Choice choose_kernel(const ChoiceInput& input) {
  // The model takes some microseconds of each call: its answers are kept.
  constexpr size_t kMostKept = 4096;
  thread_local std::unordered_map<ChoiceInput, Choice, ChoiceInputHash> kept;
  if (const auto found = kept.find(input); found != kept.end()) return found->second;
  if (kept.size() >= kMostKept) kept.clear();
  return kept[input] = fastest_kernel(input);
}

Status named_or_chosen(std::string_view config, const ChoiceInput& input, Choice* choice) {
  *choice = {};
  if (!config.empty()) {
    const auto rows = kernel_registry();
    const auto found = std::find_if(rows.begin(), rows.end(),
                                    [&](const KernelEntry& row) { return row.name == config; });
    JAX_TCGEMM_REQUIRE(found != rows.end(), "config '", config,
                       "' is not among the kernels this extension was built with");
    // A base address is known only now, and so may be the GPU, and whether a cluster fits. Where
    // they are not what the named row needs, any row that is right beats an error; and so it does
    // where the row has not the epilogue, which jax_tcgemm/lowering/gemm.py seldom leaves to it.
    if (supports(found->config, input)) choice->entry = &*found;
  }
  if (choice->entry == nullptr) *choice = choose_kernel(input);
  return Status();
}

bool begins_lines(const Operand& operand, Algorithm algorithm) {
  constexpr int kLine = 128;
  return operand.ld * element_bytes(algorithm) % kLine == 0;
}

void log_choice(const GemmProblem& problem, const KernelEntry& entry) {
  static const bool enabled = [] {
    const char* value = std::getenv("JAX_TCGEMM_LOG");
    return value != nullptr && std::string_view(value) == "1";
  }();
  if (!enabled) return;
  const GemmParams& p = problem.params;
  const std::string line =
      "jax_tcgemm: m=" + std::to_string(p.m) + " n=" + std::to_string(p.n) +
      " k=" + std::to_string(p.k) + " batch=" + std::to_string(p.batch) +
      (problem.aligned() ? "" : " unaligned") +
      (p.split_stages > 0 ? " split_stages=" + std::to_string(p.split_stages) : "") +
      (p.fixup.parts > 0 ? " fixup" : "") + " -> " + entry.name + "\n";
  thread_local std::set<std::string> seen;
  if (seen.insert(line).second) std::fputs(line.c_str(), stderr);
}

}  // namespace jax_tcgemm
