// Thread block clusters, register counts of warp roles, and named barriers.

#pragma once

#include <stdint.h>

namespace jax_tcgemm::ptx {

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
  return rank;
}

// Returns this thread's lane. Reads it anew each time, so that values computed from it do not stay
// in registers that accumulators need.
__device__ __forceinline__ uint32_t volatile_lane() {
  uint32_t lane;
  asm volatile("mov.u32 %0, %%laneid;\n" : "=r"(lane));
  return lane;
}

// Replaces a value under a condition. In C++ the compiler would turn a choice among elements of an
// array into an index, and the array would go to local memory.
__device__ __forceinline__ void replace_if(float& value, float other, bool condition) {
  asm("{\n"
      ".reg .pred chosen;\n"
      "setp.ne.u32 chosen, %2, 0;\n"
      "@chosen mov.f32 %0, %1;\n"
      "}\n"
      : "+f"(value)
      : "f"(other), "r"(static_cast<uint32_t>(condition)));
}
__device__ __forceinline__ void replace_if(int32_t& value, int32_t other, bool condition) {
  asm("{\n"
      ".reg .pred chosen;\n"
      "setp.ne.u32 chosen, %2, 0;\n"
      "@chosen mov.s32 %0, %1;\n"
      "}\n"
      : "+r"(value)
      : "r"(other), "r"(static_cast<uint32_t>(condition)));
}

// The two halves of a barrier of all threads of a cluster. It orders no memory except initialised
// barriers (fence_mbarrier_init): a release at cluster scope would be a fence of the whole GPU.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\n" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}

// Writes 8 bytes to the shared memory of block `rank` of the cluster. The bytes count towards
// `barrier` in that block.
__device__ __forceinline__ void store_cluster_8(uint32_t address, uint32_t barrier, uint32_t rank,
                                                float first, float second) {
  asm volatile(
      "{\n"
      ".reg .b32 remote, bar;\n"
      "mapa.shared::cluster.u32 remote, %0, %2;\n"
      "mapa.shared::cluster.u32 bar, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [remote], {%3, %4}, [bar];\n"
      "}\n" ::"r"(address),
      "r"(barrier), "r"(rank), "f"(first), "f"(second)
      : "memory");
}
__device__ __forceinline__ void store_cluster_8(uint32_t address, uint32_t barrier, uint32_t rank,
                                                int32_t first, int32_t second) {
  store_cluster_8(address, barrier, rank, __int_as_float(first), __int_as_float(second));
}

// Loads 16 bytes from the shared memory of block `rank` of the cluster.
__device__ __forceinline__ void load_cluster_16(float (&value)[4], uint32_t address,
                                                uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];\n"
      "}\n"
      : "=f"(value[0]), "=f"(value[1]), "=f"(value[2]), "=f"(value[3])
      : "r"(address), "r"(rank)
      : "memory");
}

// Named barrier `id` (0 .. 15) of `threads` threads.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

// target = a * b + c, by an instruction that the compiler does not move. A branch over many of them
// stays a branch; the compiler would predicate plain assignments.
__device__ __forceinline__ void multiply_add(float& target, float a, float b, float c) {
  asm volatile("fma.rn.f32 %0, %1, %2, %3;\n" : "=f"(target) : "f"(a), "f"(b), "f"(c));
}

// Counts towards a named barrier without waiting.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

// Set the registers of a thread of this warpgroup from here on, a multiple of 8.
template <int kCount>
__device__ __forceinline__ void increase_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kCount));
}

template <int kCount>
__device__ __forceinline__ void decrease_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kCount));
}

}  // namespace jax_tcgemm::ptx
