// Fragments of an m-major A of 32-bit elements: from shared memory, where TMA has put its slabs, to
// the registers from which wgmma takes A.

#pragma once

#include <stdint.h>

#include "ptx/shared_memory.cuh"

namespace jax_tcgemm::sm90 {

// A slab is so many bytes, of 32 rows. Register 2 j + h holds row 8 h + lane / 4 and k = 4 j + lane
// % 4. Odd lanes fetch the two halves of k in the other order, which spreads a warp over all banks.
template <int kSlabBytes>
struct FragmentReader {
  uint32_t offset[4];  // bytes, of the registers in the order they are fetched
  bool odd;

  __device__ __forceinline__ explicit FragmentReader(int row) {
    const int lane = threadIdx.x % 32;
    odd = lane % 2 != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int m = row + 16 * (threadIdx.x / 32 % 4) + 8 * (i % 2) + lane / 4;
      const int k = lane % 4 + 4 * (odd ? 1 - i / 2 : i / 2);
      offset[i] = m / 32 * kSlabBytes + k * 128 + (m % 32 / 4 ^ k) * 16 + m % 4 * 4;
    }
  }

  __device__ __forceinline__ void read(uint32_t (&fragment)[4], uint32_t address) const {
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = ptx::load_shared_4(address + offset[i]);
#pragma unroll
    for (int i = 0; i < 4; ++i) fragment[i] = odd ? word[i ^ 2] : word[i];
  }
};

}  // namespace jax_tcgemm::sm90
