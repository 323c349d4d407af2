// The view that a function compiled at run time (jax_tcgemm/epilogue) has of products with packed
// weights: neighbouring columns of one row of D.

#pragma once

#include <stdint.h>

#include "epilogue/compiled_row_io.cuh"
#include "sm90/packed/output.cuh"

namespace jax_tcgemm::sm90 {

template <typename Program>
struct PackedIo : CompiledRowIo<PackedIo<Program>, Program, kPackedVector> {
  static constexpr bool kBeginsInside = true;
  float acc[2][kPackedVector];  // of each weight

  template <int kIndex>
  __device__ __forceinline__ const void* operand() const {
    return this->params.operands[kIndex].data;
  }
  __device__ __forceinline__ int64_t result_row() const { return this->row; }
};

}  // namespace jax_tcgemm::sm90
