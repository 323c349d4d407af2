// Corrects the time model by measured times of rows.

#ifndef JAX_TCGEMM_DISPATCH_TIME_CORRECTION_H_
#define JAX_TCGEMM_DISPATCH_TIME_CORRECTION_H_

#include <stdint.h>

#include <array>

#include "dispatch/heuristic.h"
#include "dispatch/kernel_entry.h"

namespace jax_tcgemm {

constexpr int kTimeTerms = 22;
using TimeTerms = std::array<double, kTimeTerms>;

// Checks if products of this kind and size were timed: dense ones with aligned rows, on GPUs of
// compute capability 9.0. Products of few rows were timed with more rows of the table and longer k,
// and may have a function, which the model counts as in choice.cc.
bool has_timed_kin(const ChoiceInput& input);

// Returns facts about a product and a row. The row takes `cycles` by the model with k in `splits`
// parts. The logarithm of the correction is a linear function of these facts, with weights for each
// row; products of few rows have weights of their own.
TimeTerms time_terms(const KernelConfig& config, const ChoiceInput& input, int splits,
                     double cycles);

// Returns the factor for the model's cycles; 1 if nothing was timed.
double time_correction(const KernelEntry& entry, const ChoiceInput& input, int splits,
                       double cycles);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_DISPATCH_TIME_CORRECTION_H_
