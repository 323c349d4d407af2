#include "overlap/endpoint.h"

#include <cuda.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <map>
#include <string>

#include "common/driver.h"

namespace jax_tcgemm {
namespace {

// Buffers grow in such steps, so that calls of similar sizes share them.
constexpr int64_t kGrain = int64_t{1} << 21;

// Fewer would make every call wait for its predecessor's peers.
constexpr size_t kFewestSlots = 2;

// Returns a function of the driver; null if there is none.
template <typename Function>
Function driver_function(const char* name) {
  Function function = nullptr;
  return find_driver_function(name, &function).ok() ? function : nullptr;
}

// See Endpoint::limit_buffers.
std::atomic<int64_t> most_bytes{std::numeric_limits<int64_t>::max()};

Status create_event(cudaEvent_t* event) {
  JAX_TCGEMM_CUDA_CHECK(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "an event");
  return Status();
}

}  // namespace

Status Endpoint::of_device(int ordinal, Endpoint** endpoint) {
  static std::mutex mutex;
  static auto* const endpoints = new std::map<int, std::unique_ptr<Endpoint>>();
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Endpoint>& found = (*endpoints)[ordinal];
  if (found == nullptr) {
    auto made = std::make_unique<Endpoint>();
    made->ordinal_ = ordinal;
    JAX_TCGEMM_RETURN_IF_ERROR(made->create());
    found = std::move(made);
  }
  *endpoint = found.get();
  return Status();
}

Status Endpoint::create() {
  int lowest = 0, highest = 0;
  JAX_TCGEMM_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "priorities");
  side_.resize(kMostPeers - 1);
  for (cudaStream_t& stream : side_) {
    JAX_TCGEMM_CUDA_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest),
                          "a stream for copies");
  }
  return Status();
}

Status Endpoint::add_slot() {
  auto slot = std::make_unique<Slot>();
  slot->endpoint = this;
  JAX_TCGEMM_RETURN_IF_ERROR(create_event(&slot->ready));
  JAX_TCGEMM_RETURN_IF_ERROR(create_event(&slot->released));
  for (cudaEvent_t& event : slot->part) JAX_TCGEMM_RETURN_IF_ERROR(create_event(&event));
  for (Slot::Events& events : slot->copied) {
    for (cudaEvent_t& event : events) JAX_TCGEMM_RETURN_IF_ERROR(create_event(&event));
  }
  slots_.insert(slots_.begin(), std::move(slot));
  return Status();
}

Status Endpoint::grow(Slot* slot, int64_t bytes) {
  if (slot->bytes >= bytes) return Status();
  if (slot->buffer != nullptr) {
    // All peers have left the slot's last call, and `released` follows their copies.
    JAX_TCGEMM_CUDA_CHECK(cudaEventSynchronize(slot->released), "waiting for a buffer");
    JAX_TCGEMM_CUDA_CHECK(cudaFree(slot->buffer), "a buffer of ", slot->bytes, " bytes");
    slot->buffer = nullptr;
    slot->bytes = 0;
  }
  const int64_t rounded = (bytes + kGrain - 1) / kGrain * kGrain;
  void* memory = nullptr;
  const cudaError_t allocated =
      rounded > most_bytes ? cudaErrorMemoryAllocation : cudaMalloc(&memory, rounded);
  if (allocated != cudaSuccess) cudaGetLastError();  // or another library's check would report it
  JAX_TCGEMM_CUDA_CHECK(
      allocated, "allocating ", rounded, " bytes on device ", ordinal_,
      " for overlapped products, outside of the memory that XLA has reserved; set "
      "JAX_TCGEMM_OVERLAP=off or lower XLA_PYTHON_CLIENT_MEM_FRACTION");
  slot->buffer = static_cast<char*>(memory);
  slot->bytes = rounded;
  return Status();
}

Status Endpoint::take(int64_t bytes, Slot** slot) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto is_free = [](const auto& each) { return !each->is_busy; };
    while (slots_.size() < kFewestSlots || std::none_of(slots_.begin(), slots_.end(), is_free)) {
      JAX_TCGEMM_RETURN_IF_ERROR(add_slot());
    }
    const auto found = std::find_if(slots_.begin(), slots_.end(), is_free);
    (*found)->is_busy = true;
    *slot = found->get();
    std::rotate(found, found + 1, slots_.end());  // to the end: the most recently taken
  }
  // Without the lock: this may wait for the device, and a peer may need the lock to go on.
  const Status status = grow(*slot, bytes);
  if (!status.ok()) give_back(*slot);
  return status;
}

void Endpoint::give_back(Slot* slot) {
  const std::lock_guard<std::mutex> lock(mutex_);
  slot->is_busy = false;
}

Status Endpoint::reach(int peer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (peer == ordinal_ || reached_.contains(peer)) return Status();
  const cudaError_t enabled = cudaDeviceEnablePeerAccess(peer, 0);
  if (enabled == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();
  } else {
    JAX_TCGEMM_CUDA_CHECK(enabled, "device ", ordinal_, " cannot reach device ", peer);
  }
  reached_.insert(peer);
  return Status();
}

void Endpoint::limit_buffers(int64_t bytes) { most_bytes = bytes; }

void Endpoint::wait_for_copies() {
  for (const cudaStream_t stream : side_) {
    if (cudaStreamSynchronize(stream) != cudaSuccess) cudaGetLastError();
  }
}

bool is_reachable(const void* memory) {
  using Attribute = decltype(&cuPointerGetAttribute);
  using Retain = decltype(&cuMemRetainAllocationHandle);
  using Release = decltype(&cuMemRelease);
  using Access = decltype(&cuMemGetAccess);
  static const auto attribute = driver_function<Attribute>("cuPointerGetAttribute");
  static const auto retain = driver_function<Retain>("cuMemRetainAllocationHandle");
  static const auto release = driver_function<Release>("cuMemRelease");
  static const auto access = driver_function<Access>("cuMemGetAccess");
  if (!attribute || !retain || !release || !access) return false;
  const auto address = reinterpret_cast<CUdeviceptr>(memory);
  CUmemoryPool pool = nullptr;
  if (attribute(&pool, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, address) != CUDA_SUCCESS || pool) {
    return false;
  }
  CUmemGenericAllocationHandle handle = 0;
  if (retain(&handle, const_cast<void*>(memory)) != CUDA_SUCCESS) return true;  // of cudaMalloc
  release(handle);
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) return false;
  for (int device = 0; device < count; ++device) {
    const CUmemLocation location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
    unsigned long long flags = 0;  // NOLINT: the driver's type
    const bool is_known = access(&flags, &location, address) == CUDA_SUCCESS;
    if (!is_known || flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) return false;
  }
  return true;
}

}  // namespace jax_tcgemm
