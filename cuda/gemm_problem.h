// The problem of a call: the handlers decode it, the dispatch runs it.

#ifndef JAX_TCGEMM_GEMM_PROBLEM_H_
#define JAX_TCGEMM_GEMM_PROBLEM_H_

#include <stdint.h>

#include <string_view>

#include "gemm_params.h"
#include "kernel_config.h"

namespace jax_tcgemm {

// The computation that a call requests, and the addresses of its operands.
struct GemmProblem {
  Algorithm algorithm;
  const PlaneProduct* planes;  // multiplies float32 operands by planes; null: as they are
  GemmParams params;           // complete except for the tile order
  Major major_a;
  Major major_b;
  bool aligned_a;  // base, strides and contiguous extent are multiples of 16 bytes
  bool aligned_b;
  bool strides_aligned_a;  // base and strides are such multiples, which is enough for TMA
  bool strides_aligned_b;
  // First padded copies of unaligned operands, or planes; then products over parts of k. Null if
  // there is no workspace.
  void* workspace;
  int64_t workspace_bytes;
  int64_t padding_bytes;    // for copies or planes; 0: unaligned operands are not copied
  std::string_view config;  // a row's name, or empty: choose
  Grouped grouped;          // which extents the groups divide, see dispatch/ragged.h
  bool beside_collectives;  // the program runs on several devices: see LaunchRequest

  bool aligned() const { return aligned_a && aligned_b; }
  bool tma_addressable() const { return strides_aligned_a && strides_aligned_b; }
};

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_GEMM_PROBLEM_H_
