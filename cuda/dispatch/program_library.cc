#include "dispatch/program_library.h"

#include <map>
#include <utility>

namespace jax_tcgemm {
namespace {

// Stands for a row's name; the same as PASS in jax_tcgemm/epilogue/source.py.
constexpr const char* kPass = "pass";

// Follows the name of a row whose blocks add up parts of k; the same as ADDS_PARTS there.
constexpr const char* kAddsParts = "/parts";

// Returns the row as jax_tcgemm/epilogue/source.py names it.
std::string row_of(const KernelKey& key) {
  const std::string& layout = key.layout;
  if (layout == kPackedLayout || layout == kPackedFunctionLayout || layout == kUnpackLayout) {
    return layout;
  }
  if (key.entry == nullptr) return kPass;
  return std::string(key.entry->name) + (key.adds_parts ? kAddsParts : "");
}

struct Library {
  std::mutex mutex;
  std::map<ByProgram::Owned, std::shared_ptr<LoadedProgram>, ByProgram> programs;
};

Library& library() {
  static Library* const library = new Library;  // never freed: code that runs at exit may use it
  return *library;
}

// Digests of this package are SHA-256 in hexadecimal; others cannot be found in executables.
constexpr size_t kDigestLength = 64;

// The caller holds the library's mutex, without which nobody gets another pointer.
bool may_go(const std::shared_ptr<LoadedProgram>& loaded, bool is_used,
            std::chrono::duration<double> grace) {
  if (is_used || loaded.use_count() > 1) {
    loaded->unused_since.reset();
    return false;
  }
  const auto now = std::chrono::steady_clock::now();
  const bool was_unused = loaded->unused_since.has_value();
  if (!was_unused) loaded->unused_since = now;
  return was_unused && now - *loaded->unused_since >= grace;
}

}  // namespace

LoadedProgram::~LoadedProgram() {
  for (const LoadedKernel& kernel : kernels) unload(kernel.made);
}

std::shared_ptr<LoadedProgram> loaded_program(const EpilogueProgram& program) {
  Library& all = library();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.programs.find(program);
  if (found != all.programs.end()) {
    found->second->unused_since.reset();
    return found->second;
  }
  return all.programs.emplace(ByProgram::view(program), std::make_shared<LoadedProgram>())
      .first->second;
}

LoadedKernel* find_kernel(LoadedProgram* loaded, const KernelKey& key) {
  for (LoadedKernel& known : loaded->kernels) {
    if (known.key == key) return &known;
  }
  return nullptr;
}

Status find_or_make_kernel(const EpilogueProgram& program, const KernelKey& key,
                           std::unique_lock<std::mutex>* lock, LoadedProgram* loaded,
                           LoadedKernel** kernel) {
  *kernel = find_kernel(loaded, key);
  if (*kernel != nullptr) return Status();
  lock->unlock();
  LoadedKernel fresh = {key, {}};
  const std::string row = row_of(key);
  const Status status =
      make_kernel({program.source, row, key.layout, true, key.compute_capability}, &fresh.made);
  lock->lock();
  JAX_TCGEMM_RETURN_IF_ERROR(status);
  *kernel = find_kernel(loaded, key);
  if (*kernel != nullptr) {  // another thread has made it meanwhile
    unload(fresh.made);
    return Status();
  }
  *kernel = &loaded->kernels.emplace_back(std::move(fresh));
  return Status();
}

void release_unused_programs(const std::set<std::string>& used_digests, double grace_seconds) {
  // These programs are unloaded when the function returns, without the lock.
  std::vector<std::shared_ptr<LoadedProgram>> unused;
  Library& all = library();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const std::chrono::duration<double> grace(grace_seconds);
  for (auto at = all.programs.begin(); at != all.programs.end();) {
    const std::string& digest = at->first.first;
    const bool is_used = digest.size() != kDigestLength || used_digests.count(digest) > 0;
    if (may_go(at->second, is_used, grace)) {
      unused.push_back(std::move(at->second));
      at = all.programs.erase(at);
    } else {
      ++at;
    }
  }
}

int loaded_program_count() {
  Library& all = library();
  const std::lock_guard<std::mutex> lock(all.mutex);
  return static_cast<int>(all.programs.size());
}

}  // namespace jax_tcgemm
