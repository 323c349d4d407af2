// ldmatrix: a warp reads four 8 x 8 matrices of 16-bit elements from shared memory.
//
// Lane l gives the address of row l % 8 of matrix l / 8 (16 bytes, 16-byte aligned). It receives
// the 32 bits at row l / 4, byte 4 * (l % 4) of each matrix, or of each transpose with `_trans`. A
// row of 16 bytes may also be four 32-bit elements; tf32 uses the plain form that way.

#pragma once

#include <stdint.h>

namespace jax_tcgemm::ptx {

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&fragment)[4], uint32_t shared_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(shared_address));
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&fragment)[4],
                                                  uint32_t shared_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(shared_address));
}

}  // namespace jax_tcgemm::ptx
