// Which layouts of the operands a kernel takes. Its producer and its mainloop alone differ by them:
// what comes after the mainloop is most of a kernel's code, and stands in it once.

#pragma once

#include "gemm_params.h"
#include "kernel_config.h"
#include "sm90/output/output_tile.h"

namespace jax_tcgemm::sm90 {

// Of what the kernel calls A and B.
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

// Calls visit(layout) with that of the operands: a branch that all threads take alike.
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

// Layouts of one kernel have rings of one length.
template <typename First, typename... Others>
constexpr int ring_stages(const KernelConfig& config, LayoutSet<First, Others...>) {
  return ring_stages(config, First::kMajorA, First::kMajorB);
}

}  // namespace jax_tcgemm::sm90
