// Kernels compiled while the process runs: who compiles them, and what was loaded of them.

#ifndef JAX_TCGEMM_DISPATCH_RUN_TIME_KERNEL_H_
#define JAX_TCGEMM_DISPATCH_RUN_TIME_KERNEL_H_

#include <stdint.h>

#include <functional>
#include <string>
#include <string_view>

#include "common/status.h"
#include "kernel_set.h"

namespace jax_tcgemm {

// C++ that defines a Program (sm90/output/compiled.cuh), and what it is known by.
struct EpilogueProgram {
  std::string_view digest;
  std::string_view source;
  // Of shared memory that a warp needs for 16 x 16 values: the operands that go through it, one
  // stage ahead, and the results. Without room the operands are read where they lie, which takes
  // several times as long.
  int64_t warp_bytes = 0;
};

// Compiles a program into the kernel of a row for a layout of A and B ("nn", "nt", "tn", "tt"), or
// into a pass (dispatch/compiled_pass.h).
using Compiler = std::function<Status(std::string_view source, std::string_view row,
                                      std::string_view layout, std::string* cubin)>;

// Who compiles; called once, on import.
void set_compiler(Compiler compiler);

// Kernels are never unloaded: graphs that were captured may launch them.
struct RunTimeKernel {
  KernelHandle handle;
  int local_bytes;  // of a thread: more than 0 where registers spill
};

// Compiles and loads a kernel. Holds no lock while it compiles: who compiles may wait for a thread
// that waits for us.
Status make_kernel(const EpilogueProgram& program, std::string_view row, std::string_view layout,
                   RunTimeKernel* kernel);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_DISPATCH_RUN_TIME_KERNEL_H_
