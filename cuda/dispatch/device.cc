#include "dispatch/device.h"

#include <cuda_runtime_api.h>

#include <cstring>
#include <map>
#include <mutex>

#include "common/status.h"

namespace jax_tcgemm {
namespace {

Status query(int ordinal, DeviceProperties* properties) {
  int major = 0;
  int minor = 0;
  const struct {
    cudaDeviceAttr attribute;
    int* value;
  } queries[] = {
      {cudaDevAttrComputeCapabilityMajor, &major},
      {cudaDevAttrComputeCapabilityMinor, &minor},
      {cudaDevAttrMultiProcessorCount, &properties->sm_count},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, &properties->shared_memory_per_block},
      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, &properties->shared_memory_per_sm},
      {cudaDevAttrL2CacheSize, &properties->l2_bytes},
  };
  for (const auto& q : queries) {
    JAX_TCGEMM_CUDA_CHECK(cudaDeviceGetAttribute(q.value, q.attribute, ordinal), "attribute ",
                          static_cast<int>(q.attribute), " of device ", ordinal);
  }
  cudaDeviceProp all;
  JAX_TCGEMM_CUDA_CHECK(cudaGetDeviceProperties(&all, ordinal), "device ", ordinal);
  properties->ordinal = ordinal;
  static_assert(sizeof(properties->name) >= sizeof(all.name));
  std::memcpy(properties->name, all.name, sizeof(all.name));
  properties->compute_capability = 10 * major + minor;
  return Status();
}

}  // namespace

Status get_device_properties(int ordinal, const DeviceProperties** properties) {
  static std::mutex mutex;
  static std::map<int, DeviceProperties> known;  // nodes stay where they are
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [found, is_fresh] = known.try_emplace(ordinal);
  if (is_fresh) {
    if (Status status = query(ordinal, &found->second); !status.ok()) {
      known.erase(found);
      return status;
    }
  }
  *properties = &found->second;
  return Status();
}

Status current_device(const DeviceProperties** properties) {
  int ordinal = 0;
  if (cudaGetDevice(&ordinal) == cudaSuccess) return get_device_properties(ordinal, properties);
  cudaGetLastError();  // clears the error, or another library's check would report it
  *properties = nullptr;
  return Status();
}

Status check_device(const DeviceProperties& device) {
  JAX_TCGEMM_REQUIRE(device.compute_capability >= 75, device.name, " has compute capability ",
                     device.compute_capability / 10, ".", device.compute_capability % 10,
                     "; the kernels need 7.5 or later");
  return Status();
}

}  // namespace jax_tcgemm
