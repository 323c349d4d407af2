// The FFI entry points, kept apart so that only ffi_handler.cc includes XLA's headers.

#ifndef JAX_TCGEMM_FFI_HANDLER_H_
#define JAX_TCGEMM_FFI_HANDLER_H_

namespace jax_tcgemm {

// XLA_FFI_Handler* of the target jax_tcgemm_gemm_v1.
void* gemm_handler();
void* ragged_dot_handler();
void* activation_gradient_handler();

// "major.minor" of the XLA FFI headers this was compiled against.
const char* xla_ffi_api_version();

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_FFI_HANDLER_H_
