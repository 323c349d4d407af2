// The FFI entry points, in a file of their own so that only this folder includes XLA's headers.

#ifndef JAX_TCGEMM_FFI_HANDLERS_H_
#define JAX_TCGEMM_FFI_HANDLERS_H_

#include <cstdint>

namespace jax_tcgemm {

// Each returns an XLA_FFI_Handler*. The first four are for the stages of the targets
// jax_tcgemm_gemm_v1 and jax_tcgemm_ragged_dot_v1.
void* gemm_handler();
void* gemm_instantiate_handler();
void* ragged_dot_handler();
void* ragged_dot_instantiate_handler();
void* transpose_handler();  // for jax_tcgemm_transpose_v1
void* pack_handler();       // for jax_tcgemm_pack_v1
void* mark_handler();       // for jax_tcgemm_mark_v1
// The stages of jax_tcgemm_compiled_gemm_v4.
void* compiled_gemm_handler();
void* compiled_gemm_instantiate_handler();
// The stages of jax_tcgemm_compiled_pass_v2.
void* compiled_pass_handler();
void* compiled_pass_instantiate_handler();
// The stages of jax_tcgemm_packed_v1.
void* packed_handler();
void* packed_instantiate_handler();
// The stages of jax_tcgemm_packed_ragged_v1.
void* packed_ragged_handler();
void* packed_ragged_instantiate_handler();
// The stages of jax_tcgemm_packed_function_v1.
void* packed_function_handler();
void* packed_function_instantiate_handler();
// The stages of jax_tcgemm_unpack_v1.
void* unpack_handler();
void* unpack_instantiate_handler();

// The stages of jax_tcgemm_overlapped_v2.
void* overlapped_handler();
void* overlapped_instantiate_handler();
// The stages of jax_tcgemm_overlapped_function_v1.
void* overlapped_function_handler();
void* overlapped_function_instantiate_handler();
void* gathers_handler();  // for jax_tcgemm_gathers_v1
// Returns how often a host has waited for the number of its device in a program.
int64_t overlapped_number_reads();

// Returns "major.minor" of the XLA FFI headers of the build.
const char* xla_ffi_api_version();

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_FFI_HANDLERS_H_
