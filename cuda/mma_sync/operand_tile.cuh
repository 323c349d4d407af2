// The tile of one operand: its shape in shared memory, and the part that a thread copies.

#pragma once

#include <stdint.h>

#include "common/dtype.cuh"
#include "common/swizzle.cuh"
#include "kernel_config.h"

namespace jax_tcgemm::mma_sync {

enum class OperandRole { kA, kB };

// Compile-time constants of operand A or B of a configuration.
template <KernelConfig kConfig, OperandRole kRole, Major kMajor>
struct OperandTile {
  using Element = typename AlgorithmTraits<kConfig.algorithm>::Input;
  static constexpr int kChunkElements = 16 / sizeof(Element);
  static constexpr int kExtentMn = kRole == OperandRole::kA ? kConfig.tile_m : kConfig.tile_n;
  static constexpr int kExtentK = kConfig.tile_k;
  static constexpr int kRows = kMajor == Major::kK ? kExtentMn : kExtentK;
  static constexpr int kChunks = (kMajor == Major::kK ? kExtentK : kExtentMn) / kChunkElements;
  static constexpr int kBytes = kRows * kChunks * 16;
  static constexpr bool kIsTf32 = arithmetic_of(kConfig.algorithm).rounds_to_tf32;
  static constexpr SmemSwizzle kSwizzle =
      kMajor == Major::kMn && kIsTf32 ? SmemSwizzle::kFourRowsTwoChunks : SmemSwizzle::kEightRows;

  // A thread copies one column of chunks, every kRowStep-th row.
  static constexpr int kThreads = kConfig.threads();
  static constexpr int kRowStep = kThreads / kChunks;
  static constexpr int kPasses = kRows / kRowStep;
  static_assert(kThreads % kChunks == 0 && kRows % kRowStep == 0);

  static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
    return swizzled_offset<kSwizzle, kChunks>(row, chunk);
  }

  // Returns offset(row + pass * kRowStep, chunk), computed from the value at pass 0 if the swizzle
  // allows.
  static __device__ __forceinline__ uint32_t pass_offset(uint32_t offset0, int row, int chunk,
                                                         int pass) {
    if constexpr (kRowStep % kSwizzlePeriod == 0) {
      return offset0 + pass * kRowStep * kChunks * 16;
    } else {
      return offset(row + pass * kRowStep, chunk);
    }
  }
};

}  // namespace jax_tcgemm::mma_sync
