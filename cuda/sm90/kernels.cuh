// The kernels of a row of the sm90 family.

#pragma once

#include "dispatch/kernel_entry.h"
#include "sm90/kernel.cuh"
#include "sm90/layouts.cuh"
#include "sm90/output/output_tile.h"
#include "sm90/skinny_kernel.cuh"

namespace jax_tcgemm::sm90 {

// One kernel for all of these layouts.
template <typename Row, bool kExchanged, typename... Layouts>
KernelHandle* kernel_for() {
  void (*kernel)(GemmParams, TensorMaps);
  if constexpr (Row::kConfig.skinny) {
    kernel = skinny_kernel<Row, Layouts...>;
  } else {
    kernel = gemm_kernel<Row, kExchanged, LayoutSet<Layouts...>>;
  }
  static KernelHandle handle = {reinterpret_cast<const void*>(kernel), {}};
  return &handle;
}

// A kernel for each layout.
template <typename Row>
KernelSet one_layout_each() {
  constexpr KernelConfig kConfig = Row::kConfig;
  KernelSet set = {};
  set.by_layout[0][0] = kernel_for<Row, false, LayoutKK>();
  if constexpr (exchanges_operands(kConfig, Major::kK, Major::kMn)) {
    set.by_layout[0][1] = kernel_for<Row, true, LayoutMnK>();
  } else {
    set.by_layout[0][1] = kernel_for<Row, false, LayoutKMn>();
  }
  set.by_layout[1][0] = kernel_for<Row, false, LayoutMnK>();
  if constexpr (!transposes_b(kConfig, Major::kMn, Major::kMn) || can_transpose_b(kConfig)) {
    set.by_layout[1][1] = kernel_for<Row, false, LayoutMnMn>();
  }
  return set;
}

// Of operands that must be k-major each layout has a mainloop of a kind of its own. Small tiles are
// for products of a few microseconds, of which finding the layout's code takes 1 to 2 %.
constexpr bool has_kernel_for_each_layout(const KernelConfig& config) {
  return arithmetic_of(config.algorithm).k_major || config.skinny ||
         config.tile_m * config.tile_n <= 64 * 128;
}

template <typename Row>
KernelSet kernels_of() {
  constexpr KernelConfig kConfig = Row::kConfig;
  static_assert(static_cast<int>(Major::kK) == 0 && static_cast<int>(Major::kMn) == 1);
  if constexpr (kConfig.ragged == Ragged::kDepth) {
    return {{{}, {nullptr, kernel_for<Row, false, LayoutMnMn>()}}, {}};
  } else if constexpr (kConfig.ragged == Ragged::kRows) {
    KernelHandle* const both = kernel_for<Row, false, LayoutKMn, LayoutKK>();
    return {{{both, both}, {}}, {}};
  } else if constexpr (kConfig.exchanged) {
    return {{{kernel_for<Row, true, LayoutKK>(), kernel_for<Row, true, LayoutMnK>()}, {}}, {}};
  } else if constexpr (has_kernel_for_each_layout(kConfig)) {
    return one_layout_each<Row>();
  } else {
    KernelHandle* const all = kernel_for<Row, false, LayoutKMn, LayoutKK, LayoutMnMn, LayoutMnK>();
    return {{{all, all}, {all, all}}, {}};
  }
}

}  // namespace jax_tcgemm::sm90
