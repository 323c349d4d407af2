// Decodes the buffers of the custom call into a GemmProblem.

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

// Reads every operand into `problem`, and checks its element type, its extents and its strides
// against the buffer. The shape and the results of `problem` must be decoded already.
Status decode_operands(const Call& call, GemmProblem* problem);

// Reads m, n, k and the shape of the batch.
Status decode_shape(const GemmAttributes& attributes, GemmParams* params);

// Finds an activation by its name in jax_tcgemm/problem/activations.py; an empty name means none.
Status decode_activation(std::string_view name, Activation* activation);

// Finds the use of C by its name.
Status decode_role(std::string_view name, RoleOfC* role);

ffi::Error as_error(const Status& status);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_FFI_OPERANDS_H_
