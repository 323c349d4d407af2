// What a call asks for, between the handlers that decode it and the dispatch.

#ifndef JAX_TCGEMM_GEMM_PROBLEM_H_
#define JAX_TCGEMM_GEMM_PROBLEM_H_

#include <stdint.h>

#include <string_view>

#include "gemm_params.h"
#include "kernel_config.h"

namespace jax_tcgemm {

// Everything a call asks for, and where its operands lie.
struct GemmProblem {
  Algorithm algorithm;
  const PlaneProduct* planes;  // of which float32 operands are to be multiplied; null: as they are
  GemmParams params;           // complete but for the tile order
  Major major_a;
  Major major_b;
  bool aligned_a;  // base, strides and contiguous extent are multiples of 16 bytes
  bool aligned_b;
  bool strides_aligned_a;  // base and strides are, which is enough for TMA
  bool strides_aligned_b;
  // For padded copies of unaligned operands, or for planes, then for products over parts of k;
  // null: there is none.
  void* workspace;
  int64_t workspace_bytes;
  int64_t padding_bytes;    // of copies or planes; 0: unaligned operands are not to be copied
  std::string_view config;  // a row's name, or empty: choose
  Grouped grouped;          // of products with a compiled epilogue
  bool beside_collectives;  // the program is one of several devices: see LaunchRequest

  bool aligned() const { return aligned_a && aligned_b; }
  bool tma_addressable() const { return strides_aligned_a && strides_aligned_b; }
};

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_GEMM_PROBLEM_H_
