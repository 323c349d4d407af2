// The programs that came with custom calls, and what is compiled and loaded of each.

#ifndef JAX_TCGEMM_DISPATCH_PROGRAM_LIBRARY_H_
#define JAX_TCGEMM_DISPATCH_PROGRAM_LIBRARY_H_

#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "common/status.h"
#include "dispatch/choice.h"
#include "dispatch/kernel_entry.h"
#include "dispatch/run_time_kernel.h"

namespace jax_tcgemm {

struct LoadedKernel {
  const KernelEntry* entry;  // null: a pass
  std::string layout;
  RunTimeKernel made;
};

// What is loaded of one program. Kernels stay where they are until the program goes.
struct LoadedProgram {
  struct Chosen {
    ChoiceInput input;
    std::string config;  // that was named, or empty
    LoadedKernel* kernel;
  };

  LoadedProgram() = default;
  LoadedProgram(const LoadedProgram&) = delete;
  LoadedProgram& operator=(const LoadedProgram&) = delete;
  ~LoadedProgram();

  std::mutex mutex;  // for all that follows
  std::deque<LoadedKernel> kernels;
  std::vector<Chosen> chosen;
  bool is_awaited = false;  // prepared, and not run since: its executable is still being made
  std::optional<std::chrono::steady_clock::time_point> unused_since;
};

// Finds a program, or adds it. Whoever launches a kernel of it keeps it until that is enqueued.
std::shared_ptr<LoadedProgram> loaded_program(const EpilogueProgram& program);

// The kernel of a row and a layout, if it is loaded. The program's mutex is held.
LoadedKernel* find_kernel(LoadedProgram* loaded, const KernelEntry* entry,
                          const std::string& layout);

// Finds the kernel of a row and a layout, or compiles and loads it. `lock` is the program's, which
// is not held meanwhile.
Status find_or_make_kernel(const EpilogueProgram& program, const KernelEntry* entry,
                           const std::string& layout, std::unique_lock<std::mutex>* lock,
                           LoadedProgram* loaded, LoadedKernel** kernel);

// Releases what was found unused before, `grace_seconds` ago or longer, and still is: programs that
// have run and whose digest no executable of this process has any more. Work that was enqueued
// before an executable went may go on until then.
void release_unused_programs(const std::set<std::string>& used_digests, double grace_seconds);

int loaded_program_count();

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_DISPATCH_PROGRAM_LIBRARY_H_
