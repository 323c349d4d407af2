// The FFI entry points, kept apart so that only the files of this folder include XLA's headers.

#ifndef JAX_TCGEMM_FFI_HANDLERS_H_
#define JAX_TCGEMM_FFI_HANDLERS_H_

namespace jax_tcgemm {

// XLA_FFI_Handler* of the targets jax_tcgemm_gemm_v1 and jax_tcgemm_ragged_dot_v1, for their
// stages, and of jax_tcgemm_activation_gradient_v1.
void* gemm_handler();
void* gemm_instantiate_handler();
void* ragged_dot_handler();
void* ragged_dot_instantiate_handler();
void* activation_gradient_handler();
void* transpose_handler();  // of jax_tcgemm_transpose_v1
void* mark_handler();       // of jax_tcgemm_mark_v1
// Of jax_tcgemm_compiled_gemm_v4, for its stages.
void* compiled_gemm_handler();
void* compiled_gemm_instantiate_handler();
void* compiled_pass_handler();  // of jax_tcgemm_compiled_pass_v2
void* compiled_pass_instantiate_handler();

// "major.minor" of the XLA FFI headers this was compiled against.
const char* xla_ffi_api_version();

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_FFI_HANDLERS_H_
