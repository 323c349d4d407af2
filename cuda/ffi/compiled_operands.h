// Decodes the buffers of a custom call into the operands and results of its program.

#ifndef JAX_TCGEMM_FFI_COMPILED_OPERANDS_H_
#define JAX_TCGEMM_FFI_COMPILED_OPERANDS_H_

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "common/status.h"
#include "compiled_params.h"
#include "ffi/attributes.h"

namespace jax_tcgemm {

// The attributes of such a call that describe these operands and results.
struct EpilogueOperands {
  int64_t m, n;
  Strides batch_shape;
  Strides operand_strides;  // (batch..., m, n), one operand after the other
  Strides operand_vectors;  // 1 if the kernel reads an operand by vectors of 16 bytes
  Strides result_elements;
  size_t before;                      // buffers of the call before the epilogue's operands
  int64_t matrices;                   // of m x n
  int64_t block_rows, block_columns;  // of a block of results that a reduction joins
  std::string_view source;
  bool has_workspace = false;  // it follows the results
};

// Reads the addresses and strides. It checks that the buffers have the elements that the strides
// address, and that they agree with the source.
Status decode_epilogue(const EpilogueOperands& at, ffi::RemainingArgs& operands,
                       ffi::RemainingRets& results, CompiledParams* params);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_FFI_COMPILED_OPERANDS_H_
