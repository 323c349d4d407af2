// How much longer rows take than the time model says, as far as they were timed.

#ifndef JAX_TCGEMM_DISPATCH_TIME_CORRECTION_H_
#define JAX_TCGEMM_DISPATCH_TIME_CORRECTION_H_

#include <stdint.h>

#include <array>

#include "dispatch/heuristic.h"
#include "dispatch/kernel_entry.h"

namespace jax_tcgemm {

// Rows or columns of D, the fewer, up to which products were timed with more rows of the table and
// longer k.
constexpr int64_t kFewRows = 64;

constexpr int kTimeTerms = 22;
using TimeTerms = std::array<double, kTimeTerms>;

// Says whether products of this kind and size were timed: dense ones with aligned rows, on GPUs of
// compute capability 9.0.
bool has_timed_kin(const ChoiceInput& input);

// Facts about a product and a row, which takes `cycles` by the model with k split into so many
// parts. The logarithm of the correction is a linear function of them, with weights for each row,
// for products of few rows others than for the rest.
TimeTerms time_terms(const KernelConfig& config, const ChoiceInput& input, int splits,
                     double cycles);

// The factor for the model's cycles; 1 where nothing was timed.
double time_correction(const KernelEntry& entry, const ChoiceInput& input, int splits,
                       double cycles);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_DISPATCH_TIME_CORRECTION_H_
