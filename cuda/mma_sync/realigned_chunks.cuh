// Chunks of 16 bytes at any element's address. Two aligned loads cover a chunk, and a funnel shift
// moves it into place.

#pragma once

#include <stdint.h>

#include "common/realign.cuh"
#include "gemm_params.h"
#include "ptx/global_memory.cuh"

namespace jax_tcgemm::mma_sync {

// A thread's chunks of kPasses passes while their loads are in flight.
template <typename Element, int kPasses>
struct RealignedChunks {
  uint64_t begin, end;   // addresses that may be read
  uint32_t outside = 0;  // bit 2 * pass (+ 1): that pass's low (high) granule extends beyond them
  uint32_t low[kPasses][4];
  uint32_t high[kPasses][4];

  __device__ __forceinline__ explicit RealignedChunks(const Operand& operand)
      : begin(reinterpret_cast<uint64_t>(operand.data)),
        end(reinterpret_cast<uint64_t>(operand.data) + operand.span * sizeof(Element)) {}

  // Starts the loads of the first `bytes` bytes of a pass's chunk.
  __device__ __forceinline__ void fetch(int pass, uint64_t address, int bytes) {
    const uint64_t granule = address & ~uint64_t{15};
    const bool want_low = bytes > 0;
    const bool want_high = static_cast<int>(address & 15) + bytes > 16;
    const bool low_inside = granule >= begin && granule + 16 <= end;
    const bool high_inside = granule + 32 <= end;
    ptx::load_global_16_if(low[pass], granule, want_low && low_inside);
    ptx::load_global_16_if(high[pass], granule + 16, want_high && high_inside);
    outside |= (want_low && !low_inside) << (2 * pass);
    outside |= (want_high && !high_inside) << (2 * pass + 1);
  }

  // Loads the first and the last granule of an operand element by element. `address_of` returns the
  // address of a pass.
  template <typename AddressOf>
  __device__ __forceinline__ void fetch_outside(AddressOf&& address_of) {
    if (!outside) return;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const uint64_t granule = address_of(pass) & ~uint64_t{15};
      if (outside >> (2 * pass) & 1) load_elements<Element>(low[pass], granule, begin, end);
      if (outside >> (2 * pass + 1) & 1) {
        load_elements<Element>(high[pass], granule + 16, begin, end);
      }
    }
    outside = 0;
  }

  // Returns a loaded chunk, with zeros after its first `bytes` bytes.
  __device__ __forceinline__ void read(uint32_t (&word)[4], int pass, uint64_t address,
                                       int bytes) const {
    funnel<Element>(word, low[pass], high[pass], address & 15);
    if (bytes < 16) keep_leading_bytes(word, bytes);
  }
};

}  // namespace jax_tcgemm::mma_sync
