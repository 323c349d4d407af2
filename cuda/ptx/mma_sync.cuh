// mma.sync: D = A * B + D on one 16 x 8 tile of D, by one warp (sm_80 and later; on sm_75 with
// float16 and half as much k).
//
// Let g = lane / 4, t = lane % 4, and E = 2 (16-bit) or 1 (tf32) elements in a register:
//   A, 4 registers: (row g, k E*t), (g + 8, E*t), (g, E*t + 4*E), (g + 8, E*t + 4*E)
//   B, 2 registers: (k E*t, column g), (E*t + 4*E, g)
// With half as much k, the instruction uses the first half of these registers.
// The statements are volatile so that they keep their order: the mainloop places loads from shared
// memory between them.
//   D: (row g, columns 2*t and 2*t + 1), then (row g + 8, the same); a float32 each, or packed in
//      pairs when the accumulator is float16.

#pragma once

#include <cuda_fp16.h>
#include <stdint.h>

#include "arithmetic.h"

namespace jax_tcgemm::ptx {

template <Algorithm kAlgorithm>
struct MmaSync;

#define JAX_TCGEMM_MMA_kF32(ALGORITHM, INSTRUCTION)                                     \
  template <>                                                                           \
  struct MmaSync<Algorithm::ALGORITHM> {                                                \
    using Accumulator = float[4];                                                       \
    static __device__ __forceinline__ void run(Accumulator& d, const uint32_t (&a)[4],  \
                                               const uint32_t (&b)[2]) {                \
      asm volatile("mma.sync.aligned." INSTRUCTION                                      \
                   " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n" \
                   : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                     \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1])); \
    }                                                                                   \
  };

// The accumulators are packed in pairs.
#define JAX_TCGEMM_MMA_kF16(ALGORITHM, INSTRUCTION)                                     \
  template <>                                                                           \
  struct MmaSync<Algorithm::ALGORITHM> {                                                \
    using Accumulator = uint32_t[2];                                                    \
    static __device__ __forceinline__ void run(Accumulator& d, const uint32_t (&a)[4],  \
                                               const uint32_t (&b)[2]) {                \
      asm volatile("mma.sync.aligned." INSTRUCTION                                      \
                   " {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};\n"                 \
                   : "+r"(d[0]), "+r"(d[1])                                             \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1])); \
    }                                                                                   \
  };

// The instruction for 8 elements of k.
template <Algorithm kAlgorithm>
struct MmaSyncK8;

#define JAX_TCGEMM_MMA_K8_kF32(ALGORITHM, INSTRUCTION)                                  \
  template <>                                                                           \
  struct MmaSyncK8<Algorithm::ALGORITHM> {                                              \
    static __device__ __forceinline__ void run(float (&d)[4], uint32_t a0, uint32_t a1, \
                                               uint32_t b) {                            \
      asm volatile("mma.sync.aligned." INSTRUCTION                                      \
                   " {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};\n"             \
                   : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                     \
                   : "r"(a0), "r"(a1), "r"(b));                                         \
    }                                                                                   \
  };

#define JAX_TCGEMM_MMA_K8_kF16(ALGORITHM, INSTRUCTION)                                      \
  template <>                                                                               \
  struct MmaSyncK8<Algorithm::ALGORITHM> {                                                  \
    static __device__ __forceinline__ void run(uint32_t (&d)[2], uint32_t a0, uint32_t a1,  \
                                               uint32_t b) {                                \
      asm volatile("mma.sync.aligned." INSTRUCTION " {%0, %1}, {%2, %3}, {%4}, {%0, %1};\n" \
                   : "+r"(d[0]), "+r"(d[1])                                                 \
                   : "r"(a0), "r"(a1), "r"(b));                                             \
    }                                                                                       \
  };

#define JAX_TCGEMM_MMA(ALGORITHM, ACCUMULATOR, INSTRUCTION) \
  JAX_TCGEMM_MMA_##ACCUMULATOR(ALGORITHM, INSTRUCTION)
JAX_TCGEMM_MMA_INSTRUCTIONS(JAX_TCGEMM_MMA)
#define JAX_TCGEMM_MMA_K8(ALGORITHM, ACCUMULATOR, INSTRUCTION) \
  JAX_TCGEMM_MMA_K8_##ACCUMULATOR(ALGORITHM, INSTRUCTION)
JAX_TCGEMM_MMA_K8_INSTRUCTIONS(JAX_TCGEMM_MMA_K8)
#undef JAX_TCGEMM_MMA
#undef JAX_TCGEMM_MMA_K8
#undef JAX_TCGEMM_MMA_K8_kF16
#undef JAX_TCGEMM_MMA_K8_kF32
#undef JAX_TCGEMM_MMA_kF16
#undef JAX_TCGEMM_MMA_kF32

// Rounds a float32 to tf32 in place. mma.sync itself would truncate the lower 13 bits, which
// doubles the error and biases it.
__device__ __forceinline__ void round_to_tf32(uint32_t& value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cvt.rn.tf32.f32 %0, %1;\n" : "=r"(value) : "f"(__uint_as_float(value)));
#else
  asm volatile("cvt.rna.tf32.f32 %0, %1;\n" : "=r"(value) : "f"(__uint_as_float(value)));
#endif
}

// Returns row half `half` (row g or g + 8) of an accumulator tile as float32.
__device__ __forceinline__ float2 accumulator_pair(const float (&tile)[4], int half) {
  return {tile[2 * half], tile[2 * half + 1]};
}
__device__ __forceinline__ float2 accumulator_pair(const uint32_t (&tile)[2], int half) {
  return __half22float2(*reinterpret_cast<const __half2*>(&tile[half]));
}

}  // namespace jax_tcgemm::ptx
