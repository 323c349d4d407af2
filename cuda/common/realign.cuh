// Reads 16 bytes from any element address by two aligned loads and a funnel shift.

#pragma once

#include <stdint.h>

namespace jax_tcgemm {

// Sets word to bytes [shift, shift + 16) of (low, high); `shift` is a multiple of sizeof(Element).
template <typename Element>
__device__ __forceinline__ void funnel(uint32_t (&word)[4], const uint32_t (&low)[4],
                                       const uint32_t (&high)[4], int shift) {
  uint32_t all[8] = {low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]};
#pragma unroll
  for (int i = 0; i < 6; ++i) all[i] = shift & 8 ? all[i + 2] : all[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) all[i] = shift & 4 ? all[i + 1] : all[i];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    word[i] = sizeof(Element) == 4 ? all[i] : __funnelshift_r(all[i], all[i + 1], (shift & 2) * 8);
  }
}

// Zeros all but the first `bytes` bytes.
__device__ __forceinline__ void keep_leading_bytes(uint32_t (&word)[4], int bytes) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int left = bytes - 4 * i;
    word[i] &= left >= 4 ? 0xffffffffu : left <= 0 ? 0u : (1u << (8 * left)) - 1;
  }
}

// Loads the elements of 16 aligned bytes that lie in [begin, end), and zeros for the others.
template <typename Element>
__device__ __forceinline__ void load_elements(uint32_t (&word)[4], uint64_t address, uint64_t begin,
                                              uint64_t end) {
  constexpr int kPerWord = 4 / sizeof(Element);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    word[i] = 0;
#pragma unroll
    for (int j = 0; j < kPerWord; ++j) {
      const uint64_t element = address + i * 4 + j * sizeof(Element);
      if (element < begin || element >= end) continue;
      if constexpr (kPerWord == 2) {
        word[i] |= uint32_t{*reinterpret_cast<const uint16_t*>(element)} << (16 * j);
      } else {
        word[i] = *reinterpret_cast<const uint32_t*>(element);
      }
    }
  }
}

}  // namespace jax_tcgemm
