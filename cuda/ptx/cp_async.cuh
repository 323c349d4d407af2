// cp.async: asynchronous copies from global to shared memory (sm_80 and later).

#pragma once

#include <stdint.h>

namespace jax_tcgemm::ptx {

// Copies 16 bytes to shared memory, or writes zeros there unless `wanted`. Both addresses are
// multiples of 16. Bypasses L1: a tile is read once by its block.
__device__ __forceinline__ void cp_async_16(uint32_t shared_address, const void* source,
                                            bool wanted) {
  asm volatile(
      "{\n"
      ".reg .pred ignore;\n"
      "setp.eq.b32 ignore, %2, 0;\n"
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, ignore;\n"
      "}\n" ::"r"(shared_address),
      "l"(source), "r"(static_cast<int>(wanted)));
}

__device__ __forceinline__ void cp_async_commit_group() {
  asm volatile("cp.async.commit_group;\n" ::);
}

// Waits until at most `kPending` of this thread's committed groups are in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending));
}

}  // namespace jax_tcgemm::ptx
