// Which configuration to take: an analytic model of the time each would need.

#ifndef JAX_TCGEMM_DISPATCH_HEURISTIC_H_
#define JAX_TCGEMM_DISPATCH_HEURISTIC_H_

#include <stdint.h>

#include "epilogue/work.h"
#include "kernel_config.h"

namespace jax_tcgemm {

// What the choice depends on; nothing else, so that it can be tested without a GPU.
struct ChoiceInput {
  Algorithm algorithm;
  int64_t m, n, k, batch;
  bool aligned;          // both operands: cp.async can address them
  bool tma_addressable;  // both operands: TMA can
  Major major_a, major_b;
  EpilogueWork epilogue;
  bool gated;               // two weights
  ElementType d_type;       // a wide one may want a promoted accumulator
  int64_t workspace_bytes;  // for products over parts of k
  int compute_capability;   // 10 * major + minor
  int sm_count;
  int shared_memory_per_block;             // bytes
  int max_cluster_size = kMaxClusterSize;  // blocks
  int batch_rank;
  Grouped grouped = Grouped::kNone;
  // Bytes, up to a line of L2, of which the leading dimensions are multiples.
  int row_alignment_a = 128;
  int row_alignment_b = 128;
  bool d_by_tma = true;  // else bulk copies and threads write D
  bool has_c = false;
  bool c_by_tma = true;    // if there is one
  bool of_planes = false;  // A and B are planes, k that of all their products
  bool pairs = false;      // B is of complex numbers
  bool compiled = false;   // the epilogue is compiled at run time, into any row that can have it
  bool run_time_rows = false;  // kernels that the build lacks may be compiled

  // D is of the wider of the types that it may have.
  bool widens() const { return d_type != arithmetic_of(algorithm).output; }

  bool operator==(const ChoiceInput&) const = default;
};

// Whether a configuration can compute the problem, with k split into so many products.
bool supports(const KernelConfig& config, const ChoiceInput& input, int splits = 1);

// Says if a configuration has code for the problem's epilogue, where k is not split.
bool has_epilogue(const KernelConfig& config, const ChoiceInput& input);

// What goes before time: of configurations that support a problem, those of the highest rank are
// chosen among.
enum class Rank {
  kFallback,  // see KernelConfig::is_fallback
  kRough,     // the result is less accurate than it should be
  kAccurate,
};
Rank rank_of(const KernelConfig& config, const ChoiceInput& input);

// Expected time in clock cycles, launch overhead apart, with k split into so many products.
double estimated_cycles(const KernelConfig& config, const ChoiceInput& input, int splits = 1);

// Into how many products k may be split: as many float32 results as the workspace holds.
int max_splits(const ChoiceInput& input);

// Whether this kernel can compute so many.
bool supports_splits(const KernelConfig& config, const ChoiceInput& input, int splits);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_DISPATCH_HEURISTIC_H_
