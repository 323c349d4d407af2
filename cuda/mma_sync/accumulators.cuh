// The accumulators of a warp.

#pragma once

#include "kernel_config.h"
#include "ptx/mma_sync.cuh"

namespace jax_tcgemm::mma_sync {

// A warp's accumulators for a tile of D.
template <KernelConfig kConfig>
struct WarpAccumulators {
  static constexpr int kMmaM = kConfig.warp_m() / 16;
  static constexpr int kMmaN = kConfig.warp_n() / 8;

  typename ptx::MmaSync<kConfig.algorithm>::Accumulator
      tile[kMmaM][kMmaN];  // (warp_m / 16, warp_n / 8) mma tiles

  // Writes the `slab`-th 16 rows to the warp's float32 slab in shared memory. `slab` is a run-time
  // value, so that the kernel has the code of the epilogue only once. The registers still have
  // constant indices.
  template <typename Slab>
  __device__ __forceinline__ void store_slab(int slab, const Slab& out) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
      if (i != slab) continue;
#pragma unroll
      for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          out.store_pair(half * 8 + lane / 4, j * 8 + lane % 4 * 2,
                         ptx::accumulator_pair(tile[i][j], half));
        }
      }
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& row : tile) {
      for (auto& mma_tile : row) {
        for (auto& value : mma_tile) value = 0;
      }
    }
  }

  __device__ __forceinline__ void add(const WarpAccumulators& other) {
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
      for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
        for (int v = 0; v < 4; ++v) tile[i][j][v] += other.tile[i][j][v];
      }
    }
  }
};

}  // namespace jax_tcgemm::mma_sync
