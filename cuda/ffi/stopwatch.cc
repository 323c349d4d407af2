// The custom call that marks a point of a stream, and the times between marks: see stopwatch.h.

#include "ffi/stopwatch.h"

#include <cuda_runtime_api.h>

#include <cstddef>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>

#include "common/status.h"
#include "ffi/handlers.h"
#include "ffi/operands.h"
#include "passes/gate.h"

namespace jax_tcgemm {
namespace {

constexpr std::string_view kMeasured = "measured";  // the same as in jax_tcgemm/kernels/names.py

struct Mark {
  cudaEvent_t event;
  bool behind_gate;
};

struct Stopwatch {
  uint32_t* opened = nullptr;  // the host writes it, the GPU reads it
  uint32_t gates = 0;
  std::map<uint32_t, std::string> configs;  // of gates that are not yet enqueued
  std::string config;                       // of the last enqueued gate
  std::vector<Mark> marks;                  // since stopwatch_seconds last read them
  std::vector<cudaEvent_t> unused;
};

std::mutex mutex;

// Returns a device's stopwatch, which is never freed: threads may outlive the interpreter.
Stopwatch& stopwatch_of(int ordinal) {
  static auto* const all = new std::map<int, Stopwatch>();
  return (*all)[ordinal];
}

Status enqueue(Stopwatch* watch, bool gate, cudaStream_t stream) {
  if (watch->opened == nullptr) {
    void* memory = nullptr;
    JAX_TCGEMM_CUDA_CHECK(cudaHostAlloc(&memory, sizeof(uint32_t), cudaHostAllocPortable),
                          "memory for gates");
    watch->opened = static_cast<uint32_t*>(memory);
    *watch->opened = 0;
  }
  if (gate) {
    const auto named = watch->configs.find(watch->gates + 1);
    watch->config = named == watch->configs.end() ? std::string() : named->second;
    watch->configs.erase(watch->configs.begin(), watch->configs.upper_bound(watch->gates + 1));
    JAX_TCGEMM_CUDA_CHECK(launch_gate(watch->opened, ++watch->gates, stream), "gate ",
                          watch->gates);
  }
  cudaEvent_t event = nullptr;
  if (watch->unused.empty()) {
    JAX_TCGEMM_CUDA_CHECK(cudaEventCreate(&event), "an event");
  } else {
    event = watch->unused.back();
    watch->unused.pop_back();
  }
  watch->marks.push_back({event, gate});
  JAX_TCGEMM_CUDA_CHECK(cudaEventRecord(event, stream), "an event");
  return Status();
}

ffi::Error mark(cudaStream_t stream, int32_t ordinal, ffi::AnyBuffer, ffi::Result<ffi::AnyBuffer>,
                bool gate) {
  const std::lock_guard<std::mutex> lock(mutex);
  return as_error(enqueue(&stopwatch_of(ordinal), gate, stream));
}

// Not capturable: in a graph, events do not record their times.
XLA_FFI_DEFINE_HANDLER(kMarkHandler, mark,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Attr<bool>("gate"));

void check(cudaError_t error) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("events: ") + cudaGetErrorString(error));
  }
}

}  // namespace

Target mark_target() { return {"jax_tcgemm_mark_v1", kMarkHandler}; }

void configure_gate(int ordinal, uint32_t gate, const std::string& config) {
  const std::lock_guard<std::mutex> lock(mutex);
  stopwatch_of(ordinal).configs[gate] = config;
}

bool is_measured(std::string_view config) { return config == kMeasured; }

std::string measured_config(int ordinal) {
  const std::lock_guard<std::mutex> lock(mutex);
  return stopwatch_of(ordinal).config;
}

void open_gates(int ordinal, uint32_t count) {
  const std::lock_guard<std::mutex> lock(mutex);
  Stopwatch& watch = stopwatch_of(ordinal);
  if (watch.opened != nullptr) *static_cast<volatile uint32_t*>(watch.opened) = count;
}

std::vector<std::vector<double>> stopwatch_seconds(int ordinal) {
  std::vector<Mark> marks;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    marks.swap(stopwatch_of(ordinal).marks);
  }
  std::vector<std::vector<double>> result;
  for (size_t i = 0; i < marks.size(); ++i) {
    check(cudaEventSynchronize(marks[i].event));
    if (marks[i].behind_gate) {
      result.emplace_back();
    } else if (i > 0) {
      float milliseconds = 0.0f;
      check(cudaEventElapsedTime(&milliseconds, marks[i - 1].event, marks[i].event));
      if (!result.empty()) result.back().push_back(1e-3 * milliseconds);
    }
  }
  const std::lock_guard<std::mutex> lock(mutex);
  for (const Mark& each : marks) stopwatch_of(ordinal).unused.push_back(each.event);
  return result;
}

}  // namespace jax_tcgemm
