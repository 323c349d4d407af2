// Chooses a configuration: an analytic model of the time that each would need.

#ifndef JAX_TCGEMM_DISPATCH_HEURISTIC_H_
#define JAX_TCGEMM_DISPATCH_HEURISTIC_H_

#include <stdint.h>

#include "epilogue/work.h"
#include "kernel_config.h"

namespace jax_tcgemm {

constexpr int64_t kFewRows = 64;

// All facts that the choice depends on, so that it can be tested without a GPU.
struct ChoiceInput {
  Algorithm algorithm;
  int64_t m, n, k, batch;
  bool aligned;          // both operands: cp.async can address them
  bool tma_addressable;  // both operands: TMA can
  Major major_a, major_b;
  EpilogueWork epilogue;
  bool gated;               // two weights
  ElementType d_type;       // a wide one may need a promoted accumulator
  int64_t workspace_bytes;  // for products over parts of k
  int compute_capability;   // 10 * major + minor
  int sm_count;
  int shared_memory_per_block;             // bytes
  int max_cluster_size = kMaxClusterSize;  // blocks
  int batch_rank;
  Grouped grouped = Grouped::kNone;
  // The largest powers of two, up to a line of L2, that divide the row strides in bytes.
  int row_alignment_a = 128;
  int row_alignment_b = 128;
  bool d_by_tma = true;  // else bulk copies and threads write D
  bool has_c = false;
  bool c_by_tma = true;        // if there is a C
  bool of_planes = false;      // A and B are planes, and k is the sum over all their products
  double loaded_share = 1.0;   // of the stages: a kernel loads each plane once for all its products
  bool pairs = false;          // B consists of complex numbers
  bool compiled = false;       // the epilogue is compiled at run time, into any row that takes one
  bool reduces = false;        // such an epilogue reduces blocks of 16 x 16 results
  bool run_time_rows = false;  // kernels that the build lacks may be compiled

  // Checks if D has few rows or columns. Such products have rows of the table of their own.
  bool has_few_rows() const { return (m < n ? m : n) <= kFewRows; }
  // Checks if D has the wider of its two possible types.
  bool widens() const { return d_type != arithmetic_of(algorithm).output; }

  bool operator==(const ChoiceInput&) const = default;
};

// Abilities of a configuration, whatever the problem. jax_tcgemm/_core.pyi describes the fields.
struct RowFacts {
  bool splits_k, adds_parts, takes_functions, takes_reductions;
  int warp_buffer_bytes, shared_memory_bytes;
};
RowFacts facts_of(const KernelConfig& config);

// Checks if a configuration can compute the problem with k split into `splits` products.
bool supports(const KernelConfig& config, const ChoiceInput& input, int splits = 1);

// Returns the type of D by which rows are chosen for a function that is compiled at run time:
// float32 if the row should promote its sums. shows_sums: results show the last bits of the sums.
ElementType d_type_for_function(const ChoiceInput& input, bool shows_sums);

// Checks if a configuration has code for the problem's epilogue, if k is not split.
bool has_epilogue(const KernelConfig& config, const ChoiceInput& input);

// The rank counts before the time: only configurations of the highest rank among those that support
// a problem are considered.
enum class Rank {
  kFallback,  // for other products, or by name alone
  kRough,     // the result is less accurate than it should be
  kAccurate,
};
Rank rank_of(const KernelConfig& config, const ChoiceInput& input);

// Returns the expected clock cycles without launch overhead, with k split into `splits` products.
double estimated_cycles(const KernelConfig& config, const ChoiceInput& input, int splits = 1);

// Returns the most products that k may be split into: the workspace holds a float32 result for
// each.
int max_splits(const ChoiceInput& input);

// Checks if this kernel can compute `splits` products over parts of k.
bool supports_splits(const KernelConfig& config, const ChoiceInput& input, int splits);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_DISPATCH_HEURISTIC_H_
