#include "dispatch/run_time_row.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <compare>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "common/driver.h"
#include "dispatch/choice.h"
#include "dispatch/device.h"
#include "dispatch/run_time_kernel.h"
#include "epilogue/work.h"
#include "sm90/tensor_maps.h"

namespace jax_tcgemm {
namespace {

// The facts that a kernel is compiled for. They are the same for all requests that it serves.
struct Known {
  const KernelEntry* entry;
  int device;  // each device loads its own kernel, outside of captures
  int compute_capability;
  Major major_a, major_b;  // layouts of what the kernel calls A and B
  bool swap_ab;            // sm90
  sm90::Finish finish;     // likewise
  bool plain;              // sm80: see takes_line
  bool sum;                // sm80: the epilogue is no more than a sum
  Activation activation;
  RoleOfC role_of_c;
  ElementType d_type;

  auto operator<=>(const Known&) const = default;
};

Known known_of(const KernelEntry& entry, const LaunchRequest& request) {
  const EpilogueParams& epilogue = request.params.epilogue;
  const KernelConfig& config = entry.config;
  Known known = {};
  known.entry = &entry;
  known.device = request.device.ordinal;
  known.compute_capability = request.device.compute_capability;
  known.major_a = request.major_a;
  known.major_b = request.major_b;
  known.d_type = epilogue.d_type;
  bool asks_activation = true;
  bool asks_role = true;
  if (config.arch == Arch::kSm90) {
    known.major_a = request.maps->major_a;
    known.major_b = request.maps->major_b;
    known.swap_ab = !config.skinny && request.maps->swap_ab;
    known.finish = request.maps->finish;
    // If the cluster splits k, the code does not depend on the finish.
    const bool asks = config.split_k > 1 && !config.skinny;
    asks_activation = asks || known.finish >= sm90::Finish::kActivate;
    asks_role = asks || known.finish == sm90::Finish::kAnything;
  } else {
    known.plain = config.is_direct() && takes_line(request.params);
    known.sum = work_of(epilogue) <= EpilogueWork::kSum;
    asks_activation = asks_role = !known.plain;
  }
  if (asks_activation) known.activation = epilogue.activation;
  if (asks_role) known.role_of_c = epilogue.role_of_c;
  return known;
}

// Returns the facts as definitions that sm90/run_time_row.cuh, sm80/run_time_row.cuh and
// epilogue/known.cuh read.
std::string definitions(const Known& known) {
  const KernelConfig& config = known.entry->config;
  std::string text;
  const auto define = [&](const char* name, auto value) {
    text.append("#define JAX_TCGEMM_KNOWN_").append(name).append(" ");
    text.append(std::to_string(static_cast<int>(value))).append("\n");
  };
  define("ACTIVATION", known.activation);
  define("ROLE_OF_C", known.role_of_c);
  define("D_TYPE", known.d_type);
  if (config.arch == Arch::kSm90) {
    define("FINISH", known.finish);
    define("SWAP_AB", known.swap_ab);
    define("SKINNY", config.skinny);
  } else {
    define("SUM", known.sum);
    define("PLAIN", known.plain);
    define("DIRECT", config.is_direct());
  }
  return text;
}

std::string layout_of(const Known& known) {
  return {known.major_a == Major::kK ? 'n' : 't', known.major_b == Major::kK ? 't' : 'n'};
}

template <typename Use>
auto with_source(const Known& known, Use&& use) {
  const std::string program = definitions(known);
  const std::string layout = layout_of(known);
  return use(KernelSource{program, known.entry->name, layout, false, known.compute_capability});
}

struct Library {
  std::mutex mutex;
  std::map<Known, RunTimeKernel> kernels;
  std::atomic<bool> was_refused[kMaxDevices] = {};  // by device; the last is for all further ones
  std::atomic<bool>& was_refused_by(int device) {
    return was_refused[std::min(device, kMaxDevices - 1)];
  }
};

Library& library() {
  static Library* const library = new Library;  // never freed: code that runs at exit may use it
  return *library;
}

KernelHandle* find(const Known& known) {
  Library& all = library();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.kernels.find(known);
  return found == all.kernels.end() ? nullptr : &found->second.handle;
}

// Runs `load`, on another thread if this one captures a graph: a capturing thread cannot load code.
template <typename Load>
Status beside_capture(const LaunchRequest& request, Load&& load) {
  bool capturing = false;
  JAX_TCGEMM_RETURN_IF_ERROR(is_captured(request.stream, &capturing));
  if (!capturing) return load();
  Status status;
  std::thread([&] {
    const cudaError_t error = cudaSetDevice(request.device.ordinal);
    status = error == cudaSuccess ? load() : Status(Status::Code::kInternal, "cudaSetDevice");
  }).join();
  return status;
}

}  // namespace

bool may_compile_rows(const DeviceProperties& device) {
  return !library().was_refused_by(device.ordinal).load(std::memory_order_relaxed);
}

bool may_compile_rows() {
  const auto& refused = library().was_refused;
  return std::none_of(std::begin(refused), std::end(refused), [](const std::atomic<bool>& was) {
    return was.load(std::memory_order_relaxed);
  });
}

void begin_row_kernel(const KernelEntry& entry, const LaunchRequest& request) {
  const Known known = known_of(entry, request);
  if (find(known) == nullptr) with_source(known, begin_to_compile);
}

KernelHandle* row_kernel(const KernelEntry& entry, const LaunchRequest& request) {
  const Known known = known_of(entry, request);
  if (KernelHandle* const found = find(known)) return found;
  RunTimeKernel fresh = {};
  const Status status = beside_capture(request, [&] {
    return with_source(known,
                       [&](const KernelSource& source) { return make_kernel(source, &fresh); });
  });
  Library& all = library();
  if (!status.ok()) {
    cudaGetLastError();  // clears the error, or another library's check would report it
    log_line(status.message() + "; kernels of the build take the place of such");
    all.was_refused_by(request.device.ordinal).store(true, std::memory_order_relaxed);
    return nullptr;
  }
  const std::lock_guard<std::mutex> lock(all.mutex);
  // If two threads have made the kernel, the first one stays. The second one stays loaded, too:
  // this thread may be capturing a graph.
  return &all.kernels.emplace(known, fresh).first->second.handle;
}

}  // namespace jax_tcgemm
