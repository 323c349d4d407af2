// Rows of a warp's accumulators as float32 in shared memory. The mainloop leaves accumulators in
// the instruction's layout; the epilogue needs rows of neighbouring columns.

#pragma once

#include <stdint.h>

namespace jax_tcgemm {

// (16, kColumns) float32. Chunks of 16 bytes are XORed with the row, so that neither the 8-byte
// stores of mma.sync's layout (4 rows, 4 lanes each) nor 16-byte reads of rows have bank conflicts.
template <int kColumns>
struct AccumulatorSlab {
  static_assert(kColumns % 32 == 0);
  static constexpr int kRows = 16;

  uint32_t address;  // shared memory

  // Returns the byte offset of a chunk of 4 columns.
  static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
    return row * kColumns * 4 + (chunk ^ ((row & 3) << 1)) * 16;
  }

  __device__ __forceinline__ void store_pair(int row, int column, float2 value) const {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};\n" ::"r"(address + offset(row, column / 4) +
                                                            column % 4 * 4),
                 "f"(value.x), "f"(value.y)
                 : "memory");
  }

  __device__ __forceinline__ void load_vector(float (&value)[4], int row, int chunk) const {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];\n"
                 : "=f"(value[0]), "=f"(value[1]), "=f"(value[2]), "=f"(value[3])
                 : "r"(address + offset(row, chunk)));
  }
};

}  // namespace jax_tcgemm
