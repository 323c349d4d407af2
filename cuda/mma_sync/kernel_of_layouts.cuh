// A kernel takes several layouts of A and B. Each layout has its own mainloop, and all share the
// epilogue, which is as much code as all mainloops together.

#pragma once

#include "kernel_config.h"
#include "kernel_set.h"
#include "mma_sync/layouts.h"

namespace jax_tcgemm::mma_sync {

// Checks if A's layouts have separate kernels. If the accumulators fill the registers, a kernel
// with four mainloops would spill.
constexpr bool has_kernel_for_each_major_a(const KernelConfig& config) {
  const int bytes = element_bytes(arithmetic_of(config.algorithm).accumulator);
  const int most = element_bytes(config.algorithm) == 4 ? 64 * 32 : 64 * 64;
  return config.warp_m() * config.warp_n() * bytes >= most * 4;
}

// Returns the minimum number of blocks on an SM, which caps the registers of a thread. Small
// accumulators leave room for more blocks, which hide each other's prologue and epilogue.
constexpr int min_blocks(const KernelConfig& config) {
  const int accumulators = config.warp_m() * config.warp_n() / 32 * (config.promote ? 2 : 1);
  const int warps_per_sm = accumulators > 32 ? 8 : 12;
  return warps_per_sm * 32 >= config.threads() ? warps_per_sm * 32 / config.threads() : 1;
}

template <Major kMajorA, Major kMajorB>
struct Majors {
  static constexpr Major kA = kMajorA;
  static constexpr Major kB = kMajorB;
};

// Call visit(Majors) with the operands' layouts. All threads take the same branches.
template <Major kMajorA, typename Visitor>
__device__ __forceinline__ void visit_majors(const Layouts& layouts, Visitor&& visit) {
  if (layouts.b == Major::kK) {
    visit(Majors<kMajorA, Major::kK>());
  } else {
    visit(Majors<kMajorA, Major::kMn>());
  }
}
template <typename Visitor>
__device__ __forceinline__ void visit_majors(const Layouts& layouts, Visitor&& visit) {
  if (layouts.a == Major::kK) {
    visit_majors<Major::kK>(layouts, visit);
  } else {
    visit_majors<Major::kMn>(layouts, visit);
  }
}

// Returns the kernels of a row. handle_of<kMajorsA...>() returns the kernel for A of one layout, or
// of either.
template <typename Row, typename HandleOf>
KernelSet kernel_set(HandleOf&& handle_of) {
  if constexpr (has_kernel_for_each_major_a(Row::kConfig)) {
    KernelHandle* const k_major = handle_of.template operator()<Major::kK>();
    KernelHandle* const mn_major = handle_of.template operator()<Major::kMn>();
    return {{{{k_major, k_major}, {mn_major, mn_major}}}, {}};
  } else {
    KernelHandle* const all = handle_of.template operator()<>();
    return {{{{all, all}, {all, all}}}, {}};
  }
}

}  // namespace jax_tcgemm::mma_sync
