// Lists the kernels of a row of the sm90 family.

#pragma once

#include "kernel_set.h"
#include "sm90/kernel.cuh"
#include "sm90/layouts.cuh"
#include "sm90/output/output_tile.h"
#include "sm90/skinny_kernel.cuh"
#include "sm90/tensor_maps.h"

namespace jax_tcgemm::sm90 {

// Returns one kernel for all of `Layouts`.
template <typename Row, bool kSwapAb, typename... Layouts>
KernelHandle* kernel_for() {
  void (*kernel)(GemmParams, TensorMaps);
  if constexpr (Row::kConfig.skinny) {
    kernel = skinny_kernel<Row, LayoutSet<Layouts...>>;
  } else {
    kernel = gemm_kernel<Row, kSwapAb, LayoutSet<Layouts...>>;
  }
  static KernelHandle handle = {reinterpret_cast<const void*>(kernel), {}};
  return &handle;
}

template <typename Row>
KernelsByLayout one_for_all() {
  KernelHandle* const all = kernel_for<Row, false, LayoutKMn, LayoutKK, LayoutMnMn, LayoutMnK>();
  return {{{all, all}, {all, all}}};
}

template <typename Row>
KernelsByLayout one_each() {
  constexpr KernelConfig kConfig = Row::kConfig;
  KernelsByLayout kernels = {};
  kernels.handle[0][0] = kernel_for<Row, false, LayoutKK>();
  if constexpr (swaps_operands(kConfig, Major::kK, Major::kMn)) {
    kernels.handle[0][1] = kernel_for<Row, true, LayoutMnK>();
  } else {
    kernels.handle[0][1] = kernel_for<Row, false, LayoutKMn>();
  }
  kernels.handle[1][0] = kernel_for<Row, false, LayoutMnK>();
  if constexpr (!transposes_b(kConfig, Major::kMn, Major::kMn) || can_transpose_b(kConfig)) {
    kernels.handle[1][1] = kernel_for<Row, false, LayoutMnMn>();
  }
  return kernels;
}

// Checks if the tiles are small. Small tiles serve products that take a few microseconds, where
// finding the layout's code would take 1 to 2 % of the time.
constexpr bool is_for_moments(const KernelConfig& config) {
  return config.skinny || config.tile_m * config.tile_n <= 64 * 128;
}

template <typename Row>
struct SimpleRow {
  static constexpr KernelConfig kConfig = with_simple_epilogue(Row::kConfig);
};

template <typename Row>
KernelSet kernels_of() {
  constexpr KernelConfig kConfig = Row::kConfig;
  static_assert(static_cast<int>(Major::kK) == 0 && static_cast<int>(Major::kMn) == 1);
  if constexpr (kConfig.pairs) {
    return {{{{nullptr, kernel_for<Row, true, LayoutMnK>()}, {}}}, {}};
  } else if constexpr (kConfig.planes) {
    // passes/split_planes.cu writes k-major planes.
    return {{{{kernel_for<Row, false, LayoutKK>()}, {}}}, {}};
  } else if constexpr (kConfig.grouped == Grouped::kK) {
    return {{{{}, {nullptr, kernel_for<Row, false, LayoutMnMn>()}}}, {}};
  } else if constexpr (kConfig.grouped == Grouped::kM) {
    KernelHandle* const both = kernel_for<Row, false, LayoutKMn, LayoutKK>();
    return {{{{both, both}, {}}}, {}};
  } else if constexpr (kConfig.swap_ab) {
    return {{{{kernel_for<Row, true, LayoutKK>(), kernel_for<Row, true, LayoutMnK>()}, {}}}, {}};
  } else if constexpr (arithmetic_of(kConfig.algorithm).k_major) {
    return {one_each<Row>(), {}};  // each layout has its own kind of mainloop
  } else if constexpr (!is_for_moments(kConfig)) {
    return {one_for_all<Row>(), {}};
  } else if constexpr (kConfig.epilogue != EpilogueWork::kAny ||
                       (kConfig.split_k > 1 && !kConfig.skinny)) {
    return {one_each<Row>(), {}};
  } else {
    return {one_for_all<Row>(), one_each<SimpleRow<Row>>()};
  }
}

}  // namespace jax_tcgemm::sm90
