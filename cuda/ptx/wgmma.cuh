// wgmma: D (64 x n in registers; float32, or int32 for integers) += A (64 x 32 bytes of k) * B (32
// bytes of k x n). The four warps of a warpgroup issue it, and it runs asynchronously. B lies in
// shared memory, A in shared memory or in registers.
//
// Accumulators: thread t of the warpgroup holds rows 16 (t / 32) + t % 32 / 4 + {0, 8} and columns
// 8 j + 2 (t % 4) + {0, 1}, in register 4 j + 2 (row / 8) + column.

#pragma once

#include <stdint.h>

#include "kernel_config.h"

namespace jax_tcgemm::ptx {

// Needed before the first wgmma, and after writes to registers that a wgmma reads.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving accesses to accumulators over this point.
template <int kCount>
__device__ __forceinline__ void wgmma_fence_registers(float (&d)[kCount]) {
#pragma unroll
  for (float& value : d) asm volatile("" : "+f"(value)::"memory");
}
template <int kCount>
__device__ __forceinline__ void wgmma_fence_registers(int32_t (&d)[kCount]) {
#pragma unroll
  for (int32_t& value : d) asm volatile("" : "+r"(value)::"memory");
}

// Returns the descriptor of an operand in shared memory. Rows have 128, 64 or 32 bytes with the
// swizzle of that size; a pattern is 8 rows. k-major: rows along mn. mn-major: rows along k, and
// `block_bytes` from one block of mn to the next.
template <int kRowBytes = 128>
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address, int block_bytes) {
  static_assert(kRowBytes == 128 || kRowBytes == 64 || kRowBytes == 32);
  constexpr uint64_t kSwizzle = uint64_t{kRowBytes == 128 ? 1 : kRowBytes == 64 ? 2 : 3} << 62;
  constexpr uint64_t kPatternStride = uint64_t{8 * kRowBytes / 16} << 32;
  const uint64_t block_stride = uint64_t{static_cast<uint32_t>(block_bytes) / 16} << 16;
  return kSwizzle | kPatternStride | block_stride | ((address & 0x3ffff) >> 4);
}

// Returns the same descriptor moved by `bytes`.
__device__ __forceinline__ uint64_t advance(uint64_t descriptor, int bytes) {
  return descriptor + (bytes >> 4);
}

// The instruction for one extent n. cuda/build/generate.py writes the specialisations for the tiles
// of the kernel table, because the list of registers is part of an instruction's text. Its static
// functions, which return nothing:
//
//   from_shared<major of A, major of B>(d, descriptor of A, descriptor of B, accumulate)
//   from_registers(d, fragments of A, descriptor of B, accumulate)
//
// Only tf32 has from_registers. If `accumulate` is false, the instruction overwrites D.
template <Algorithm kAlgorithm, int kN>
struct Wgmma;

#include "wgmma_instructions.inc"

}  // namespace jax_tcgemm::ptx
