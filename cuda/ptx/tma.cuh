// cp.async.bulk.tensor: TMA copies of boxes between shared memory and global tensors, which a
// CUtensorMap describes. Coordinates are in elements, the contiguous dimension first.

#pragma once

#include <stdint.h>

namespace jax_tcgemm::ptx {

__device__ __forceinline__ void prefetch_tensor_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}

// Copies from global to shared memory. The bytes count towards `barrier`.
__device__ __forceinline__ void tma_load(uint32_t shared, const void* map, uint32_t barrier, int x,
                                         int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];\n" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}

__device__ __forceinline__ void tma_load(uint32_t shared, const void* map, uint32_t barrier, int x,
                                         int y, int z, int u, int v) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];\n" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(u), "r"(v)
      : "memory");
}

// The same into every block of the cluster whose bit is set in `blocks`, at the same addresses.
__device__ __forceinline__ void tma_load_multicast(uint32_t shared, const void* map,
                                                   uint32_t barrier, uint16_t blocks, int x, int y,
                                                   int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%4, %5, %6}], [%2], %3;\n" ::"r"(shared),
      "l"(map), "r"(barrier), "h"(blocks), "r"(x), "r"(y), "r"(z)
      : "memory");
}

__device__ __forceinline__ void tma_load_multicast(uint32_t shared, const void* map,
                                                   uint32_t barrier, uint16_t blocks, int x, int y,
                                                   int z, int u, int v) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;\n" ::"r"(shared),
      "l"(map), "r"(barrier), "h"(blocks), "r"(x), "r"(y), "r"(z), "r"(u), "r"(v)
      : "memory");
}

// Copies from shared to global memory. TMA writes nothing outside the tensor. L2 evicts the written
// lines first, because operands use its space better.
__device__ __forceinline__ void tma_store(const void* map, uint32_t shared, int x, int y, int z) {
  constexpr uint64_t kEvictFirst = 0x12f0000000000000;
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group.L2::cache_hint"
      " [%0, {%2, %3, %4}], [%1], %5;\n" ::"l"(map),
      "r"(shared), "r"(x), "r"(y), "r"(z), "l"(kEvictFirst)
      : "memory");
}

// Copies contiguous bytes. The count and both addresses are multiples of 16.
__device__ __forceinline__ void bulk_store(void* to, uint32_t shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(to),
               "r"(shared), "r"(bytes)
               : "memory");
}

// The same from global to shared memory. The bytes count towards `barrier`.
__device__ __forceinline__ void bulk_load(uint32_t shared, const void* from, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::
          "r"(shared),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;\n" ::: "memory");
}

// Waits until at most kPending of this thread's stores still have to read shared memory.
template <int kPending>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(kPending) : "memory");
}

// Orders this thread's ordinary accesses to shared memory before later ones of TMA and wgmma.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

// The same for global memory: later bulk copies see all writes that this thread sees.
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;\n" ::: "memory");
}

}  // namespace jax_tcgemm::ptx
