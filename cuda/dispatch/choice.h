// Chooses a row of the kernel table for a problem.

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

// A row, and how it computes the problem.
struct Choice {
  const KernelEntry* entry = nullptr;  // null: no row supports the problem
  int splits = 1;                      // parts of k, each a product
  bool has_fixup = false;              // the kernel itself adds up these products
  bool is_built = true;                // the kernel is in the build

  // The row with the epilogues that its kernel has code for.
  KernelConfig config() const { return is_built ? entry->built_config() : entry->config; }
};

// Returns the choice that is expected to be fastest.
Choice choose_kernel(const ChoiceInput& input);

struct Estimate {
  Choice choice;
  double cycles;  // clock cycles without launch overhead; only their ratios matter
};

// Returns the problem as the model sees it for a row. A function of few results costs less than a
// built epilogue in skinny rows with small tiles, and about the same in each of them. In other rows
// nothing hides it if there are few blocks (lab/epilogues.md).
ChoiceInput as_modelled(ChoiceInput input, const KernelConfig& config);

// Returns the choices that compute the problem with the best available accuracy, the expected
// fastest first. choose_kernel looks at numbers of parts of k that are powers of two;
// `dense_splits` tries up to 4 numbers to each doubling.
std::vector<Estimate> ranked_choices(const ChoiceInput& input, bool dense_splits);

// Returns the same choices in no order, timed by the model without dispatch/time_correction.h.
std::vector<Estimate> modelled_choices(const ChoiceInput& input, bool dense_splits);

// Returns the choices for an epilogue that is compiled at run time: the one named `config` if it
// can compute the problem, else all, the expected fastest first. They have room in shared memory
// for the epilogue. A warp needs `warp_bytes` for the epilogue's operands and results, and
// `result_bytes` for the results alone. Without room for the results, it cannot be compiled.
// Without room for the operands it takes longer than with registers that spill, so such rows stay
// only if there are no others.
std::vector<Estimate> compiled_choices(std::string_view config, const ChoiceInput& input,
                                       bool dense_splits, int64_t warp_bytes, int64_t result_bytes);

// Returns the name of a choice: its row's name, followed by "/splits=N" if k is split into N parts.
std::string config_of(const Choice& choice);

// Returns the choice named `config` if it can compute the problem, else the one that is expected to
// be fastest. A named row may be unusable for several reasons:
//   - the base addresses are known only now, and maybe the GPU and the cluster size that fits;
//   - an exported program may name a row that no longer exists.
// If no row supports the problem, the caller reports it.
Choice named_or_chosen(std::string_view config, const ChoiceInput& input);

// Returns the largest power of two, up to a line of L2, that divides an operand's row stride in
// bytes. The base address has no influence: XLA promises no more than multiples of 16 bytes, and
// buffers move between recordings of a graph, which must have the same kernels each time.
int row_alignment(const Operand& operand, Algorithm algorithm);

// Prints a line if JAX_TCGEMM_LOG is 1, once for each thread.
void log_line(const std::string& text);

// Prints one line for each distinct choice if JAX_TCGEMM_LOG is 1.
void log_choice(const GemmProblem& problem, const KernelEntry& entry);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_DISPATCH_CHOICE_H_
