// The operand layouts that a kernel takes. Only the producer and the mainloop depend on them. The
// code after the mainloop is most of a kernel and exists once for all layouts.

#pragma once

#include "gemm_params.h"
#include "kernel_config.h"
#include "sm90/output/output_tile.h"

namespace jax_tcgemm::sm90 {

// The layouts of the operands that the kernel calls A and B.
template <Major kA, Major kB>
struct Layout {
  static constexpr Major kMajorA = kA;
  static constexpr Major kMajorB = kB;
};

using LayoutKK = Layout<Major::kK, Major::kK>;
using LayoutKMn = Layout<Major::kK, Major::kMn>;
using LayoutMnK = Layout<Major::kMn, Major::kK>;
using LayoutMnMn = Layout<Major::kMn, Major::kMn>;

template <typename... Layouts>
struct LayoutSet {};

// Calls visit(layout) with the operands' layout. All threads take the same branch.
template <typename Last, typename Visitor>
__device__ __forceinline__ void visit_layout(LayoutSet<Last>, const GemmParams&, Visitor&& visit) {
  visit(Last());
}
template <typename First, typename Second, typename... Others, typename Visitor>
__device__ __forceinline__ void visit_layout(LayoutSet<First, Second, Others...>,
                                             const GemmParams& params, Visitor&& visit) {
  if (params.k_major_a == (First::kMajorA == Major::kK) &&
      params.k_major_b == (First::kMajorB == Major::kK)) [[likely]] {
    visit(First());
  } else {
    visit_layout(LayoutSet<Second, Others...>(), params, visit);
  }
}

// All layouts of one kernel have rings of the same length.
template <typename First, typename... Others>
constexpr int ring_stages(const KernelConfig& config, LayoutSet<First, Others...>) {
  return ring_stages(config, First::kMajorA, First::kMajorB);
}

}  // namespace jax_tcgemm::sm90
