// What an sm90 kernel needs beside GemmParams: how TMA sees the operands.

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

// What becomes of the accumulators, from the least to the most work.
enum class Finish {
  kProduct,  // D is the product, rounded
  kAddBias,  // alpha * product + bias
  kAddC,     // alpha * product + bias + beta * C, with C by TMA
  kRows,     // alpha * product + bias, where TMA cannot address D
  // f(alpha * product + bias), gated or not, and no further result, with D by TMA
  kActivate,
  kAnything,
};

// Whether D leaves in whole rows: see output_box.
constexpr bool in_whole_rows(Finish finish) {
  return finish != Finish::kAddC && finish != Finish::kAnything;
}

// Which of them a kernel has code for; of a row that splits k, and of a skinny one, it is other
// code. Parts of rows of D take little of it, and so do sums, where they are unrolled. Swapped
// (see sm90/output/output_tile.h), rows of the accumulators are columns of D.
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

// A row for any epilogue with the code alone for those before kActivate.
constexpr KernelConfig with_simple_epilogue(KernelConfig config) {
  const bool sums = config.unrolls_sums() || config.skinny;
  config.epilogue = sums ? EpilogueWork::kSum : EpilogueWork::kNone;
  return config;
}

// A __grid_constant__ kernel parameter. Boxes are what one TMA instruction copies.
struct TensorMaps {
  TensorMap a;  // (batch..., m, k) or (batch..., k, m), the contiguous dimension last
  TensorMap b;
  TensorMap b2;    // of a gated product
  TensorMap c;     // (batch, m, n); used if c_by_tma
  TensorMap c2;    // likewise, if has_c2
  TensorMap d;     // (batch, m, n); used if d_by_tma
  TensorMap aux;   // likewise, if there is one
  TensorMap aux2;  // likewise
  // Batch dimensions along which an operand moves; the others are broadcast.
  uint8_t a_moves[kMaxBatchRank];
  uint8_t b_moves[kMaxBatchRank];
  bool c_moves;
  bool has_c2;
  bool c_by_tma;
  bool d_by_tma;
  Finish finish;
  bool swap_ab;  // D^T is computed
  // Of what the kernel calls A and B.
  Major major_a;
  Major major_b;
};

}  // namespace jax_tcgemm::sm90

#endif  // JAX_TCGEMM_SM90_TENSOR_MAPS_H_
