// What an sm90 kernel needs beside GemmParams: how TMA sees the operands.

#ifndef JAX_TCGEMM_SM90_TENSOR_MAPS_H_
#define JAX_TCGEMM_SM90_TENSOR_MAPS_H_

#include <stdint.h>

#include "gemm_params.h"

namespace jax_tcgemm::sm90 {

// A CUtensorMap, which only the driver's header defines.
struct alignas(64) TensorMap {
  uint64_t words[16];
};

// A __grid_constant__ kernel parameter. Boxes are what one TMA instruction copies.
struct TensorMaps {
  TensorMap a;  // (batch..., m, k) or (batch..., k, m), the contiguous dimension last
  TensorMap b;
  TensorMap c;    // (batch, m, n); used if c_by_tma
  TensorMap d;    // (batch, m, n); used if d_by_tma
  TensorMap aux;  // likewise, if there is one
  // Batch dimensions along which an operand moves; the others are broadcast.
  uint8_t a_moves[kMaxBatchRank];
  uint8_t b_moves[kMaxBatchRank];
  bool c_moves;
  bool c_by_tma;
  bool d_by_tma;
  bool plain;      // D is the accumulators, rounded
  bool exchanged;  // D^T is computed
};

}  // namespace jax_tcgemm::sm90

#endif  // JAX_TCGEMM_SM90_TENSOR_MAPS_H_
