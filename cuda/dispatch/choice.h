// From a problem to a row of the table: which rows can compute it, and which of them to take.

#ifndef JAX_TCGEMM_DISPATCH_CHOICE_H_
#define JAX_TCGEMM_DISPATCH_CHOICE_H_

#include <span>
#include <string_view>

#include "common/status.h"
#include "dispatch/heuristic.h"
#include "dispatch/kernel_entry.h"
#include "gemm_problem.h"

namespace jax_tcgemm {

std::span<const KernelEntry> kernel_registry();

// A compiled row, into how many products it splits k, and whether it adds them up itself.
struct Choice {
  const KernelEntry* entry = nullptr;  // null: no row supports the problem
  int splits = 1;
  bool has_fixup = false;
};

// What is expected to be fastest.
Choice choose_kernel(const ChoiceInput& input);

// The row called `config`, if it supports the problem, else what is expected to be fastest. No such
// name is an error; no row at all is for the caller to tell of.
Status named_or_chosen(std::string_view config, const ChoiceInput& input, Choice* choice);

// Whether an operand's rows begin with lines of L2 where its base address does. Of that nothing is
// presumed but multiples of 16 bytes, as XLA gives: buffers move between the recordings of a graph,
// which must have the same kernels each time.
bool begins_lines(const Operand& operand, Algorithm algorithm);

// One line for each distinct choice when JAX_TCGEMM_LOG is 1.
void log_choice(const GemmProblem& problem, const KernelEntry& entry);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_DISPATCH_CHOICE_H_
