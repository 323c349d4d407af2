// The gate of gate.h: one thread reads the host's memory about every 200 ns.

#include "passes/gate.h"

namespace jax_tcgemm {
namespace {

constexpr uint64_t kMostNanoseconds = 20'000'000;

__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__global__ void gate_kernel(const volatile uint32_t* opened, uint32_t number) {
  const uint64_t begun = nanoseconds();
  while (*opened < number && nanoseconds() - begun < kMostNanoseconds) __nanosleep(200);
}

}  // namespace

cudaError_t launch_gate(const uint32_t* opened, uint32_t number, cudaStream_t stream) {
  gate_kernel<<<1, 1, 0, stream>>>(opened, number);
  return cudaGetLastError();
}

}  // namespace jax_tcgemm
