// Kernels compiled at run time: their source, the compiler, and the loaded kernels.

#ifndef JAX_TCGEMM_DISPATCH_RUN_TIME_KERNEL_H_
#define JAX_TCGEMM_DISPATCH_RUN_TIME_KERNEL_H_

#include <stdint.h>

#include <functional>
#include <string>
#include <string_view>
#include <utility>

#include "common/status.h"
#include "kernel_set.h"

namespace jax_tcgemm {

// C++ that defines a Program (epilogue/compiled_output.cuh), and its digest.
struct EpilogueProgram {
  std::string_view digest;
  std::string_view source;
  // Shared memory that a warp needs for 16 x 16 values: the results, and the operands that go
  // through it one stage ahead. Without room the kernel reads operands from global memory, which
  // takes several times as long.
  int64_t warp_bytes = 0;
  int64_t result_bytes = 0;  // the results alone
  bool reduces = false;      // it has results that are reduced from blocks of 16 x 16 values
  bool shows_sums = false;   // results may show the last bits of the sums
};

// Orders programs by digest and then by source. The digest alone does not identify a program,
// because it comes with the call.
struct ByProgram {
  using is_transparent = void;
  using Owned = std::pair<std::string, std::string>;

  template <typename One, typename Other>
  bool operator()(const One& one, const Other& other) const {
    return view(one) < view(other);
  }

  static std::pair<std::string_view, std::string_view> view(const EpilogueProgram& program) {
    return {program.digest, program.source};
  }
  static std::pair<std::string_view, std::string_view> view(const Owned& owned) { return owned; }
};

// The source of a kernel. It is one of these:
//   - a program as the epilogue of a row;
//   - a program in a pass of its own (dispatch/compiled_pass.h);
//   - a kernel for packed weights (dispatch/packed.h), whose program is its PackedConfig;
//   - a row with one of the package's epilogues.
struct KernelSource {
  std::string_view program;  // C++ that defines a Program, or facts about the epilogue
  std::string_view row;
  std::string_view layout;  // of A and B: "nn", "nt", "tn" or "tt"
  bool has_program = true;
  int compute_capability = 90;  // 10 * major + minor
};

struct Compiler {
  std::function<Status(const KernelSource&, std::string* cubin)> compile;
  // Begins to compile on another thread; `compile` will wait for it.
  std::function<void(const KernelSource&)> begin;
};

// Sets the compiler; called once, on import.
void set_compiler(Compiler compiler);

struct RunTimeKernel {
  KernelHandle handle;
  int local_bytes;  // of a thread; more than 0 if registers spill
  void* library;    // the loaded CUlibrary
};

// Compiles and loads a kernel. It holds no lock while it compiles: the compiler may wait for a
// thread that waits for this one.
Status make_kernel(const KernelSource& source, RunTimeKernel* kernel);

// Unloads a kernel, which neither enqueued work nor a graph may launch any more.
void unload(const RunTimeKernel& kernel);

// Begins to compile a kernel on another thread.
void begin_to_compile(const KernelSource& source);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_DISPATCH_RUN_TIME_KERNEL_H_
