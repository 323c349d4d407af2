// From the buffers of a custom call to the operands and results of a program that came with it.

#ifndef JAX_TCGEMM_FFI_COMPILED_OPERANDS_H_
#define JAX_TCGEMM_FFI_COMPILED_OPERANDS_H_

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "common/status.h"
#include "compiled_params.h"
#include "ffi/attributes.h"

namespace jax_tcgemm {

// What the attributes of such a call say of them.
struct EpilogueOperands {
  int64_t m, n;
  Strides batch_shape;
  Strides operand_strides;  // (batch..., m, n), one operand after the other
  Strides operand_vectors;  // 1 where one is read by vectors of 16 bytes
  Strides result_elements;
  size_t before;                      // buffers of the call before them
  int64_t matrices;                   // of m x n
  int64_t block_rows, block_columns;  // of results that reductions join
  std::string_view source;
};

// Reads the addresses and strides. The buffers have what the strides address, and are what the
// source says.
Status decode_epilogue(const EpilogueOperands& at, ffi::RemainingArgs& operands,
                       ffi::RemainingRets& results, CompiledParams* params);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_FFI_COMPILED_OPERANDS_H_
