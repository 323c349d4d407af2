// From the buffers of the custom call to a GemmProblem.

#ifndef JAX_TCGEMM_FFI_OPERANDS_H_
#define JAX_TCGEMM_FFI_OPERANDS_H_

#include "common/status.h"
#include "dispatch/dispatch.h"
#include "ffi/attributes.h"

namespace jax_tcgemm {

struct Call {
  const GemmAttributes& attributes;
  ffi::RemainingArgs& operands;
  ffi::RemainingRets& results;
};

// Reads every operand into `problem`, whose shape and results are decoded already, and checks its
// element type, its extents and its strides against the buffer.
Status decode_operands(const Call& call, GemmProblem* problem);

// Reads how A and B will lie, whose addresses are not known yet: presumed to be multiples of 16
// bytes, as XLA's are.
Status decode_layouts(const GemmAttributes& attributes, GemmProblem* problem);

// Reads m, n, k and the batch's shape.
Status decode_shape(const GemmAttributes& attributes, GemmParams* params);

// An activation by its name in jax_tcgemm/problem/activations.py; empty: none.
Status decode_activation(std::string_view name, Activation* activation);

// What becomes of C, by its name.
Status decode_role(std::string_view name, RoleOfC* role);

ffi::Error as_error(const Status& status);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_FFI_OPERANDS_H_
