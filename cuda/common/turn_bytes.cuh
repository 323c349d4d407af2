// Transposes 4 x 4 bytes in registers.

#pragma once

#include <stdint.h>

namespace jax_tcgemm {

// Moves byte j of word i to byte i of word j.
__device__ __forceinline__ void turn_bytes(uint32_t (&out)[4], const uint32_t (&in)[4]) {
  const uint32_t low01 = __byte_perm(in[0], in[1], 0x5140);
  const uint32_t low23 = __byte_perm(in[2], in[3], 0x5140);
  const uint32_t high01 = __byte_perm(in[0], in[1], 0x7362);
  const uint32_t high23 = __byte_perm(in[2], in[3], 0x7362);
  out[0] = __byte_perm(low01, low23, 0x5410);
  out[1] = __byte_perm(low01, low23, 0x7632);
  out[2] = __byte_perm(high01, high23, 0x5410);
  out[3] = __byte_perm(high01, high23, 0x7632);
}

}  // namespace jax_tcgemm
