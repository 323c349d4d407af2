// The parameters of an sm90 kernel besides GemmParams: how TMA sees the operands.

#ifndef JAX_TCGEMM_SM90_TENSOR_MAPS_H_
#define JAX_TCGEMM_SM90_TENSOR_MAPS_H_

#include <stdint.h>

#include "gemm_params.h"
#include "kernel_config.h"

namespace jax_tcgemm::sm90 {

// A CUtensorMap, which only the driver's header defines.
struct alignas(64) TensorMap {
  uint64_t words[16];
};

// The work of an epilogue on the accumulators, ordered from the least to the most work.
enum class Finish {
  kProduct,  // D is the product, rounded
  kAddBias,  // alpha * product + bias
  kAddC,     // alpha * product + bias + beta * C, with C by TMA
  kRows,     // alpha * product + bias, where TMA cannot address D
  // f(alpha * product + bias), gated or not, and no further result, with D by TMA
  kActivate,
  kAnything,
};

// Checks if D leaves in whole rows (see output_box).
constexpr bool in_whole_rows(Finish finish) {
  return finish != Finish::kAddC && finish != Finish::kAnything;
}

// Checks if a kernel has code for `finish`. Rows that split k and skinny rows have other code.
// kRows takes little code, and so do the sums if the row unrolls them. If the operands are swapped
// (sm90/output/output_tile.h), rows of the accumulators are columns of D.
constexpr bool has_finish(const KernelConfig& config, Finish finish, bool swap_ab) {
  if (config.epilogue == EpilogueWork::kAny && finish >= Finish::kActivate) return true;
  if (config.gated) return false;
  switch (finish) {
    case Finish::kProduct:
      return true;
    case Finish::kAddBias:
      if (config.swap_ab) return config.epilogue == EpilogueWork::kSum;
      [[fallthrough]];
    case Finish::kAddC:
      return config.epilogue >= EpilogueWork::kSum && config.unrolls_sums() && !swap_ab;
    case Finish::kRows:
      return config.grouped == Grouped::kNone && !swap_ab;
    default:
      return false;
  }
}

// The row with only the code for finishes below kActivate, from a row for any epilogue.
constexpr KernelConfig with_simple_epilogue(KernelConfig config) {
  const bool sums = config.unrolls_sums() || config.skinny;
  config.epilogue = sums ? EpilogueWork::kSum : EpilogueWork::kNone;
  return config;
}

// A __grid_constant__ kernel parameter. A box is what one TMA instruction copies.
struct TensorMaps {
  TensorMap a;  // (batch..., m, k) or (batch..., k, m), the contiguous dimension last
  TensorMap b;
  TensorMap b2;    // of a gated product
  TensorMap c;     // (batch, m, n); used if c_by_tma
  TensorMap c2;    // as c; used if has_c2
  TensorMap d;     // (batch, m, n); used if d_by_tma
  TensorMap aux;   // as d; used if the epilogue writes it
  TensorMap aux2;  // as aux
  // Batch dimensions along which an operand moves; the operand is broadcast along the others.
  uint8_t a_moves[kMaxBatchRank];
  uint8_t b_moves[kMaxBatchRank];
  bool c_moves;
  bool has_c2;
  bool c_by_tma;
  bool d_by_tma;
  Finish finish;
  bool swap_ab;  // the kernel computes D^T
  // Layouts of the operands that the kernel calls A and B.
  Major major_a;
  Major major_b;
};

}  // namespace jax_tcgemm::sm90

#endif  // JAX_TCGEMM_SM90_TENSOR_MAPS_H_
