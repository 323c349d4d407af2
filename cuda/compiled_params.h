// Parameters of kernels whose epilogue is compiled at run time, beyond GemmParams, and the kinds of
// such an epilogue's operands and results.

#ifndef JAX_TCGEMM_COMPILED_PARAMS_H_
#define JAX_TCGEMM_COMPILED_PARAMS_H_

#include <stdint.h>

#include "gemm_params.h"

namespace jax_tcgemm {

// An operand of the epilogue: (batch, m, n) with any strides, 0 along broadcast dimensions.
struct CompiledOperand {
  const void* data;
  int64_t stride_m;  // elements
  int64_t stride_n;
  BatchStrides batch;
};

// Block scales of 8-bit operands: see kScaleBlock.
struct BlockScales {
  const float* a;  // (batch, m, blocks of k), with any strides
  const float* b;  // (batch, blocks of k, blocks of n)
  int64_t a_stride_m, a_stride_k, b_stride_k, b_stride_n;  // elements
  BatchStrides a_batch, b_batch;
};

struct CompiledParams : GemmParams {
  BlockScales scales;
  CompiledOperand operands[kMaxCompiledOperands];
  void* results[kMaxCompiledResults];  // each (batch, m, n), contiguous
};

// Threads of a block of passes/compiled_pass.cuh.
constexpr int kPassThreads = 32 * kPassWarps;
static_assert(kPassThreads == kPassColumns, "a thread joins a column of all warps");

// The dimensions of D along which an operand changes.
enum class Along { kNothing, kRows, kColumns, kMatrix };

struct CompiledOperandKind {
  Along along;
  int bytes;  // of an element
  // 16 bytes of neighbouring columns are contiguous, aligned, and inside or outside of D together.
  bool by_vectors;

  // Checks if the operand goes through shared memory, ahead of its use.
  constexpr bool is_staged() const { return by_vectors && along >= Along::kColumns; }
};

struct CompiledResultKind {
  int bytes;
  bool by_vectors;
};

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_COMPILED_PARAMS_H_
