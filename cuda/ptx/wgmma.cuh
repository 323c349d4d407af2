// wgmma: D (64 x n, float32 or, of integers, int32 in registers) += A (64 x 32 bytes of k) * B (32
// bytes of k x n), issued by the four warps of a warpgroup and done asynchronously. B lies in
// shared memory, A there or in registers.
//
// Accumulators: thread t of the warpgroup holds rows 16 (t / 32) + t % 32 / 4 + {0, 8} and columns
// 8 j + 2 (t % 4) + {0, 1}; register 4 j + 2 (row / 8) + column.

#pragma once

#include <stdint.h>

#include <type_traits>

#include "kernel_config.h"

namespace jax_tcgemm::ptx {

// Before the first wgmma, and wherever registers it reads were written.
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

// What accumulators are.
template <Algorithm kAlgorithm>
using SumOf =
    std::conditional_t<arithmetic_of(kAlgorithm).accumulator == ElementType::kS32, int32_t, float>;

// An operand in shared memory in rows of 128 bytes with the 128-byte swizzle, or of 64 or 32 with
// that one: a pattern is 8 rows. k-major: rows along mn. mn-major: rows along k, and `block_bytes`
// from the end of a row's mn to the next.
template <int kRowBytes = 128>
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address, int block_bytes) {
  static_assert(kRowBytes == 128 || kRowBytes == 64 || kRowBytes == 32);
  constexpr uint64_t kSwizzle = uint64_t{kRowBytes == 128 ? 1 : kRowBytes == 64 ? 2 : 3} << 62;
  constexpr uint64_t kPatternStride = uint64_t{8 * kRowBytes / 16} << 32;
  const uint64_t block_stride = uint64_t{static_cast<uint32_t>(block_bytes) / 16} << 16;
  return kSwizzle | kPatternStride | block_stride | ((address & 0x3ffff) >> 4);
}

// The same descriptor `bytes` further.
__device__ __forceinline__ uint64_t advance(uint64_t descriptor, int bytes) {
  return descriptor + (bytes >> 4);
}

// The instruction of one extent n; the specialisations are written by cuda/build/generate.py for
// the tiles of the kernel table, because the list of registers is part of an instruction's text.
//
//   static void from_shared<major of A, major of B>(d, descriptor of A, descriptor of B,
//   accumulate) static void from_registers(d, fragments of A, descriptor of B, accumulate) (tf32
//   alone)
//
// `accumulate` false sets D instead of adding to it.
template <Algorithm kAlgorithm, int kN>
struct Wgmma;

#include "wgmma_instructions.inc"

}  // namespace jax_tcgemm::ptx
