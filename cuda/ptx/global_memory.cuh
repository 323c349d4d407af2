// Loads from global memory, and flags there.

#pragma once

#include <stdint.h>

namespace jax_tcgemm::ptx {

// Loads 16 bytes if `wanted`, else returns zeros. It is one predicated instruction, because loads
// behind branches would wait for one another.
__device__ __forceinline__ void load_global_16_if(uint32_t (&word)[4], uint64_t address,
                                                  bool wanted) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.b32 wanted, %5, 0;\n"
      "mov.b32 %0, 0;\n"
      "mov.b32 %1, 0;\n"
      "mov.b32 %2, 0;\n"
      "mov.b32 %3, 0;\n"
      "@wanted ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "=&r"(word[0]), "=&r"(word[1]), "=&r"(word[2]), "=&r"(word[3])
      : "l"(address), "r"(static_cast<int>(wanted)));
}

// Loads 4, 8 or 16 bytes that no kernel writes while this one runs. Returns zeros unless kSurely or
// `wanted`.
template <bool kSurely>
__device__ __forceinline__ void load_global(uint32_t (&word)[1], const void* address, bool wanted) {
  word[0] = kSurely || wanted ? __ldg(static_cast<const uint32_t*>(address)) : 0u;
}
template <bool kSurely>
__device__ __forceinline__ void load_global(uint32_t (&word)[2], const void* address, bool wanted) {
  const auto* const from = static_cast<const uint2*>(address);
  const uint2 read = kSurely || wanted ? __ldg(from) : uint2{};
  word[0] = read.x, word[1] = read.y;
}
template <bool kSurely>
__device__ __forceinline__ void load_global(uint32_t (&word)[4], const void* address, bool wanted) {
  const auto* const from = static_cast<const uint4*>(address);
  const uint4 read = kSurely || wanted ? __ldg(from) : uint4{};
  word[0] = read.x, word[1] = read.y, word[2] = read.z, word[3] = read.w;
}

// Prefetches a line of 128 bytes into L2.
__device__ __forceinline__ void prefetch_line(const void* address) {
  asm volatile("prefetch.global.L2 [%0];\n" ::"l"(address));
}

// Loads a value that no kernel writes while this one runs. The compiler does not delay the load
// until its use.
__device__ __forceinline__ float load_global_4(const float* address) {
  float value;
  asm volatile("ld.global.nc.f32 %0, [%1];\n" : "=f"(value) : "l"(address));
  return value;
}

// Sets a flag after all writes of this thread, and those that it has observed, are visible to the
// GPU.
__device__ __forceinline__ void store_release(uint64_t* flag, uint64_t value) {
  asm volatile("st.release.gpu.global.b64 [%0], %1;\n" ::"l"(flag), "l"(value) : "memory");
}

// Waits until a flag has this value. The thread then sees all writes from before the flag was set.
__device__ __forceinline__ void wait_acquire(const uint64_t* flag, uint64_t value) {
  uint64_t seen;
  do {
    asm volatile("ld.acquire.gpu.global.b64 %0, [%1];\n" : "=l"(seen) : "l"(flag) : "memory");
  } while (seen != value);
}

}  // namespace jax_tcgemm::ptx
