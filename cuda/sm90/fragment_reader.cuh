// Reads fragments of an m-major A of 32-bit elements from shared memory, where TMA has put its
// slabs, into the registers from which wgmma takes A.

#pragma once

#include <stdint.h>

#include "ptx/shared_memory.cuh"

namespace jax_tcgemm::sm90 {

// A slab has kSlabBytes bytes and holds 32 rows. Register 2 j + h holds row 8 h + lane / 4 and k =
// 4 j + lane % 4. Some lanes fetch the two halves of k in the other order, which spreads a warp
// over all banks. kPairs: A holds complex numbers (as GemmParams::pairs_of_b). Shared memory then
// has half as many k. For an odd k the reader takes the other parts of the numbers and negates the
// imaginary ones.
template <int kSlabBytes, bool kPairs>
struct FragmentReader {
  static constexpr int kStepBytes = kPairs ? 512 : 1024;  // of a step of 8 k
  uint32_t offset[4];  // in bytes, in the order in which the registers are fetched
  bool late;
  uint32_t sign = 0;

  __device__ __forceinline__ explicit FragmentReader(int row) {
    const int lane = threadIdx.x % 32;
    late = (kPairs ? lane / 2 : lane) % 2 != 0;
    const int other = kPairs ? lane % 2 : 0;
    if (kPairs && other != 0 && lane / 4 % 2 == 0) sign = 0x80000000;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int m = (row + 16 * (threadIdx.x / 32 % 4) + 8 * (i % 2) + lane / 4) ^ other;
      int k = lane % 4 + 4 * (late ? 1 - i / 2 : i / 2);
      if constexpr (kPairs) k /= 2;
      offset[i] = m / 32 * kSlabBytes + k * 128 + (m % 32 / 4 ^ k) * 16 + m % 4 * 4;
    }
  }

  // Reads the fragment of a step of 8 k from the slabs at `address`. The swizzle repeats every 8
  // rows.
  __device__ __forceinline__ void read(uint32_t (&fragment)[4], uint32_t address, int step) const {
    const uint32_t turned = kPairs && step % 2 != 0 ? 64 : 0;
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      word[i] = ptx::load_shared_4(address + step * kStepBytes + (offset[i] ^ turned));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      fragment[i] = late ? word[i ^ 2] : word[i];
      if constexpr (kPairs) fragment[i] ^= sign;
    }
  }
};

}  // namespace jax_tcgemm::sm90
