// stmatrix: writes 8 x 8 matrices of 16-bit elements from registers to shared memory. Lane i gives
// the address of row i % 8 of matrix i / 8. It is the inverse of ldmatrix.

#pragma once

#include <stdint.h>

namespace jax_tcgemm::ptx {

__device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t (&matrix)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(address),
               "r"(matrix[0]), "r"(matrix[1]), "r"(matrix[2]), "r"(matrix[3])
               : "memory");
}

// Writes the transposes of two matrices. Lanes 16 to 31 give no address.
__device__ __forceinline__ void stmatrix_x2_trans(uint32_t address, const uint32_t (&matrix)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};\n" ::"r"(address),
               "r"(matrix[0]), "r"(matrix[1])
               : "memory");
}

}  // namespace jax_tcgemm::ptx
