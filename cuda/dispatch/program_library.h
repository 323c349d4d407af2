// The programs of custom calls, and the kernels that are compiled and loaded for each.

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

// These take the place of a row's name and of a layout if the kernel is one for packed weights; the
// same as PACKED, PACKED_FUNCTION and UNPACK in jax_tcgemm/epilogue/source.py.
inline constexpr const char kPackedLayout[] = "packed";
inline constexpr const char kPackedFunctionLayout[] = "packed_function";
inline constexpr const char kUnpackLayout[] = "unpack";

// Identifies a kernel among those of a program.
struct KernelKey {
  const KernelEntry* entry = nullptr;  // null: a pass, or a kernel for packed weights
  std::string layout = {};
  bool adds_parts = false;  // its blocks add up parts of k: sm90/split_k/in_workspace.cuh
  int compute_capability = 90;

  bool operator==(const KernelKey&) const = default;
};

struct LoadedKernel {
  KernelKey key;
  RunTimeKernel made;
};

// The kernels of one program. Their addresses stay the same as long as the program is loaded.
struct LoadedProgram {
  struct Chosen {
    ChoiceInput input;
    std::string config;  // the config that the call names, or empty
    LoadedKernel* kernel;
    int splits;  // parts of k
  };

  LoadedProgram() = default;
  LoadedProgram(const LoadedProgram&) = delete;
  LoadedProgram& operator=(const LoadedProgram&) = delete;
  ~LoadedProgram();

  std::mutex mutex;  // guards the following two members
  std::deque<LoadedKernel> kernels;
  std::vector<Chosen> chosen;
  // The library's mutex guards this one.
  std::optional<std::chrono::steady_clock::time_point> unused_since;
};

// Finds a program, or adds it; from then on it counts as used. A caller that launches one of its
// kernels keeps the pointer until the kernel is enqueued.
std::shared_ptr<LoadedProgram> loaded_program(const EpilogueProgram& program);

// Returns a kernel, or null if it is not loaded. The caller holds the program's mutex.
LoadedKernel* find_kernel(LoadedProgram* loaded, const KernelKey& key);

// Finds a kernel, or compiles and loads it. The function releases `lock`, the program's, while it
// compiles.
Status find_or_make_kernel(const EpilogueProgram& program, const KernelKey& key,
                           std::unique_lock<std::mutex>* lock, LoadedProgram* loaded,
                           LoadedKernel** kernel);

// Releases the programs that an earlier call found unused, at least `grace_seconds` ago, and that
// nobody has asked for since. A program is unused if no executable of this process has its digest.
// The grace time is for executables that XLA is still making, and for work that was enqueued before
// an executable was freed.
void release_unused_programs(const std::set<std::string>& used_digests, double grace_seconds);

int loaded_program_count();

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_DISPATCH_PROGRAM_LIBRARY_H_
