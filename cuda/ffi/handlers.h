// The FFI entry points, in a file of their own so that only this folder includes XLA's headers.

#ifndef JAX_TCGEMM_FFI_HANDLERS_H_
#define JAX_TCGEMM_FFI_HANDLERS_H_

#include <cstdint>

namespace jax_tcgemm {

// A custom call: its name, and an XLA_FFI_Handler for each stage.
struct Target {
  template <typename Handler>
  Target(const char* name, Handler* execute, Handler* instantiate = nullptr)
      : name(name),
        execute(reinterpret_cast<void*>(execute)),
        instantiate(reinterpret_cast<void*>(instantiate)) {}

  const char* name;
  void* execute;
  void* instantiate;  // null: there is nothing to prepare
};

Target gemm_target();
Target ragged_dot_target();
Target compiled_gemm_target();
Target compiled_pass_target();
Target packed_target();
Target packed_ragged_target();
Target packed_function_target();
Target overlapped_target();
Target overlapped_function_target();
Target gathers_target();
Target pack_target();
Target unpack_target();
Target transpose_target();
Target mark_target();

// Returns how often a host has waited for the number of its device in a program.
int64_t overlapped_number_reads();

// Returns "major.minor" of the XLA FFI headers of the build.
const char* xla_ffi_api_version();

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_FFI_HANDLERS_H_
