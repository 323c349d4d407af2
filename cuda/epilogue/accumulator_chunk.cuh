// A warp's accumulators in registers, 16 x 16 at a time. wgmma and mma.sync lay them out in the
// same way: a warp has 16 consecutive rows of a block.

#pragma once

namespace jax_tcgemm {

// A thread's part of 16 x 16 accumulators. Value i is in row lane / 4 + i / 2 % 2 * 8 and in column
// lane % 4 * 2 + i % 2 + i / 4 * 8.
constexpr int kChunkRows = 16;
constexpr int kChunkColumns = 16;
constexpr int kChunkValues = 8;
using Chunk = float[kChunkValues];

// The place of accumulators: their first row and column in D or in D^T.
struct OutputPlace {
  int row;
  int column;
  int batch;
};

// Calls use(i, accumulator) for the 8 accumulators that a thread has in 16 columns. `index` counts
// the groups of 16 columns: kPerBlock in each block, beginning with kFirst. Registers cannot be
// indexed at run time, so this jumps to separate code for each index.
template <int kFirst, int kPerBlock, typename Sum, int kBlocks, int kBlockValues, typename Use>
__device__ __forceinline__ void visit_chunk(const Sum (&acc)[kBlocks][kBlockValues], int index,
                                            Use&& use) {
  constexpr int kCount = kBlocks * kPerBlock;
  const auto visit = [&]<int kIndex>() {
    if constexpr (kIndex < kCount) {
      constexpr int kValue = (kFirst + kIndex % kPerBlock) * kChunkValues;
#pragma unroll
      for (int i = 0; i < kChunkValues; ++i) use(i, acc[kIndex / kPerBlock][kValue + i]);
    }
  };
  static_assert(kCount <= 24);
  switch (index) {
#define JAX_TCGEMM_CASE(i)          \
  case i:                           \
    visit.template operator()<i>(); \
    break;
#define JAX_TCGEMM_CASES(i) \
  JAX_TCGEMM_CASE(i) JAX_TCGEMM_CASE(i + 1) JAX_TCGEMM_CASE(i + 2) JAX_TCGEMM_CASE(i + 3)
    JAX_TCGEMM_CASES(0)
    JAX_TCGEMM_CASES(4)
    JAX_TCGEMM_CASES(8)
    JAX_TCGEMM_CASES(12)
    JAX_TCGEMM_CASES(16)
    JAX_TCGEMM_CASES(20)
#undef JAX_TCGEMM_CASES
#undef JAX_TCGEMM_CASE
    default:
      __builtin_unreachable();
  }
}

}  // namespace jax_tcgemm
