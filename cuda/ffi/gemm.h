// Parts of the custom call of a product that other calls share.

#ifndef JAX_TCGEMM_FFI_GEMM_H_
#define JAX_TCGEMM_FFI_GEMM_H_

#include "common/status.h"
#include "ffi/attributes.h"

namespace jax_tcgemm {

// Begins to compile kernels for the process's current GPU. For another kind of GPU the first run
// compiles them.
Status begin_kernels(const GemmAttributes& attributes, ffi::RemainingRets& results);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_FFI_GEMM_H_
