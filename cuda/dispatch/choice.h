// From a problem to a row of the table: which rows can compute it, and which of them to take.

#ifndef JAX_TCGEMM_DISPATCH_CHOICE_H_
#define JAX_TCGEMM_DISPATCH_CHOICE_H_

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dispatch/heuristic.h"
#include "dispatch/kernel_entry.h"
#include "gemm_problem.h"

namespace jax_tcgemm {

std::span<const KernelEntry> kernel_registry();

// A row, into how many products it splits k, whether it adds them up itself, and whether its kernel
// is in the build.
struct Choice {
  const KernelEntry* entry = nullptr;  // null: no row supports the problem
  int splits = 1;
  bool has_fixup = false;
  bool is_built = true;

  // The row with the epilogues that its kernel has code for.
  KernelConfig config() const { return is_built ? entry->built_config() : entry->config; }
};

// What is expected to be fastest.
Choice choose_kernel(const ChoiceInput& input);

// All that can compute the problem as accurately as any, the fastest first by what is expected.
// choose_kernel looks at parts of k that are powers of two; `dense_splits` are up to 4 numbers to
// each doubling.
struct Estimate {
  Choice choice;
  double cycles;  // of the clock, launches apart; only their ratios matter
};
std::vector<Estimate> ranked_choices(const ChoiceInput& input, bool dense_splits);

// The same in no order, by the time model alone (dispatch/time_correction.h).
std::vector<Estimate> modelled_choices(const ChoiceInput& input, bool dense_splits);

// Keeps those rows that have room in shared memory for an epilogue that is compiled at run time, if
// any has: without room it takes longer than with registers that spill, or cannot be compiled.
// `warp_bytes` is what a warp needs for its operands and results.
std::vector<Estimate> with_room(std::vector<Estimate> ranked, int64_t warp_bytes);

// The name of a choice: that of its row, and "/splits=N" after it where k is split into N.
std::string config_of(const Choice& choice);

// What is called `config`, if that can compute the problem, else what is expected to be fastest: a
// base address is known only now, and so may be the GPU, and whether a cluster fits; and a program
// that was exported may name a row that there is no more. No row at all is for the caller to tell
// of.
Choice named_or_chosen(std::string_view config, const ChoiceInput& input);

// Bytes, up to a line of L2, of which the distance of an operand's rows is a multiple: a power of
// two. Of the base address nothing is presumed but multiples of 16 bytes, as XLA gives: buffers
// move between the recordings of a graph, which must have the same kernels each time.
int row_alignment(const Operand& operand, Algorithm algorithm);

// Prints a line when JAX_TCGEMM_LOG is 1, once for each thread.
void log_line(const std::string& text);

// One line for each distinct choice when JAX_TCGEMM_LOG is 1.
void log_choice(const GemmProblem& problem, const KernelEntry& entry);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_DISPATCH_CHOICE_H_
