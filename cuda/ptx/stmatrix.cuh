// stmatrix: four 8 x 8 matrices of 16-bit elements from registers to shared memory; lane i gives
// the address of row i % 8 of matrix i / 8. The inverse of ldmatrix.

#pragma once

#include <stdint.h>

namespace jax_tcgemm::ptx {

template <bool kTransposed>
__device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t (&matrix)[4]) {
  if constexpr (kTransposed) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(address),
        "r"(matrix[0]), "r"(matrix[1]), "r"(matrix[2]), "r"(matrix[3])
        : "memory");
  } else {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(address),
        "r"(matrix[0]), "r"(matrix[1]), "r"(matrix[2]), "r"(matrix[3])
        : "memory");
  }
}

}  // namespace jax_tcgemm::ptx
