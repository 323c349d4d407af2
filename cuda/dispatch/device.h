// Properties of a GPU, read once per process and device.

#ifndef JAX_TCGEMM_DISPATCH_DEVICE_H_
#define JAX_TCGEMM_DISPATCH_DEVICE_H_

#include <atomic>

#include "kernel_config.h"

namespace jax_tcgemm {

class Status;

struct DeviceProperties {
  int ordinal = 0;
  int compute_capability = 0;  // 10 * major + minor
  int sm_count = 0;
  int shared_memory_per_block = 0;  // bytes, with opt-in
  int shared_memory_per_sm = 0;     // bytes
  int l2_bytes = 0;
  char name[256] = {};
  // The largest cluster that no launch has found too large: MPS may leave a process too few SMs for
  // larger ones.
  mutable std::atomic<int> max_cluster_size = kMaxClusterSize;
};

// Reads a device's properties, which live as long as the process.
Status get_device_properties(int ordinal, const DeviceProperties** properties);

// The same for the process's current GPU; null if there is none.
Status current_device(const DeviceProperties** properties);

// Returns an error for a GPU that no kernel runs on.
Status check_device(const DeviceProperties& device);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_DISPATCH_DEVICE_H_
