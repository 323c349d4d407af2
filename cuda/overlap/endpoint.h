// The means of a device to exchange data: side streams, and slots with a buffer and events.

#ifndef JAX_TCGEMM_OVERLAP_ENDPOINT_H_
#define JAX_TCGEMM_OVERLAP_ENDPOINT_H_

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "common/status.h"
#include "overlap/meeting.h"
#include "shared_limits.h"

namespace jax_tcgemm {

class Endpoint;

// The buffer and the events of one call on one device. Peers write into the buffer and wait for the
// events. They write into a buffer of XLA's (`target`) only between `ready` and the end of the
// call.
struct Slot {
  using Events = std::array<cudaEvent_t, kMostPeers>;

  char* buffer = nullptr;
  int64_t bytes = 0;
  int64_t sent_bytes = 0;          // that this device sends to each peer
  char* target = nullptr;          // for data that stays after the call: XLA's, or in `buffer`
  cudaEvent_t ready = nullptr;     // the call has begun: its operands are there
  cudaEvent_t released = nullptr;  // the call has read the buffer
  Events part = {};                // the part for a rank is computed
  std::array<Events, kMostRounds> copied = {};  // the copy to a rank is done
  Endpoint* endpoint = nullptr;
  bool is_busy = false;  // guarded by the endpoint
};

class Endpoint {
 public:
  // Returns the endpoint of the current device, which lives as long as the process.
  static Status of_device(int ordinal, Endpoint** endpoint);

  // Takes a slot with a buffer of at least so many bytes. Consecutive calls take different slots,
  // so a peer can write for the next call while this device reads. If a call fails, its slot is
  // never given back: peers may still write into the buffer.
  Status take(int64_t bytes, Slot** slot);
  void give_back(Slot* slot);

  // Lets this device write to the memory of another.
  Status reach(int peer);

  // Makes larger buffers fail as if there were no memory, for tests.
  static void limit_buffers(int64_t bytes);

  // Waits until this device's copies to others are done.
  void wait_for_copies();

  int ordinal() const { return ordinal_; }
  cudaStream_t side_stream(int i) const { return side_[i]; }

 private:
  Status create();
  Status add_slot();
  Status grow(Slot* slot, int64_t bytes);

  int ordinal_ = 0;
  std::mutex mutex_;
  std::vector<cudaStream_t> side_;
  std::vector<std::unique_ptr<Slot>> slots_;  // the least recently taken first
  std::set<int> reached_;
};

// Checks if other devices can write to this memory. They can if it comes from cudaMalloc, as that
// of XLA's default allocator does.
bool is_reachable(const void* memory);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_OVERLAP_ENDPOINT_H_
