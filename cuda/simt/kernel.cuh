// The simt kernel: products too small to be worth a pipeline. It has no shared memory, no barrier and
// little code, since at this size the time goes into fetching instructions and one trip to memory.
//
// Roles: thread (x, y) of a block computes row y, columns 4 x .. 4 x + 3 of a tile of
//        (tile_m, tile_n) of D, by float32 FMA over all of k.
// Barriers: none.
// Timeline: loads of tile_k steps of k in flight together -> FMA -> ... -> epilogue.

#pragma once

#include <stdint.h>

#include "common/dtype.cuh"
#include "epilogue/fused_epilogue.cuh"
#include "gemm_params.h"
#include "kernel_config.h"
#include "scheduler/raster.cuh"

namespace jax_tcgemm::simt {

template <KernelConfig kConfig, Major kMajorA, Major kMajorB>
struct Kernel {
  using Element = typename AlgorithmTraits<kConfig.algorithm>::Element;
  static constexpr int kLanesPerRow = kConfig.tile_n / kVectorColumns;
  static constexpr int kGroups = kConfig.tile_k / kVectorColumns;  // of 4 steps of k

  // 4 elements of an operand (mn, k), along k (kAlongK) or along mn, of which `count` are inside.
  template <Major kMajor, bool kAlongK>
  static __device__ __forceinline__ void load(Vector& out, const Operand& operand, int64_t offset,
                                              int mn, int k, int count) {
    constexpr bool kContiguous = (kMajor == Major::kK) == kAlongK;
    Addend source = {};
    source.data = operand.data;
    source.stride_n = kContiguous ? 1 : operand.ld;
    source.vectorizable = kContiguous && operand.vectorizable;
    source.is_float32 = sizeof(Element) == 4;
    load_vector<Element>(
        out, source,
        offset + (kMajor == Major::kK ? mn * operand.ld + k : k * operand.ld + mn), count);
  }

  static __device__ __forceinline__ void accumulate(const GemmParams& params, int batch, int row,
                                                    int column, Vector& acc) {
    const int64_t offset_a = batch_offset(params, batch, params.a.batch);
    const int64_t offset_b = batch_offset(params, batch, params.b.batch);
#pragma unroll 1
    for (int k0 = 0; k0 < params.k; k0 += kConfig.tile_k) {
      Vector a[kGroups];
      Vector b[kGroups][kVectorColumns];  // (k, column), or (column, k) when B is k-major
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        const int k = k0 + i * kVectorColumns;
        load<kMajorA, true>(a[i], params.a, offset_a, row, k, params.k - k);
#pragma unroll
        for (int j = 0; j < kVectorColumns; ++j) {
          if constexpr (kMajorB == Major::kK) {
            load<kMajorB, true>(b[i][j], params.b, offset_b, column + j, k,
                                column + j < params.n ? params.k - k : 0);
          } else {
            load<kMajorB, false>(b[i][j], params.b, offset_b, column, k + j,
                                 k + j < params.k ? params.n - column : 0);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
#pragma unroll
        for (int kk = 0; kk < kVectorColumns; ++kk) {
#pragma unroll
          for (int j = 0; j < kVectorColumns; ++j) {
            acc[j] = fmaf(a[i][kk], kMajorB == Major::kK ? b[i][j][kk] : b[i][kk][j], acc[j]);
          }
        }
      }
    }
  }

  static __device__ __forceinline__ void run(const GemmParams& params) {
    for (TileWalk walk(params); !walk.done(params); walk.advance(params)) {
      const TileCoordinate tile = raster_tile(params.raster, walk.index);
      const int row = tile.tile_m * kConfig.tile_m + threadIdx.x / kLanesPerRow;
      const int column =
          tile.tile_n * kConfig.tile_n + threadIdx.x % kLanesPerRow * kVectorColumns;
      if (row >= params.m || column >= params.n) continue;
      Vector acc[1] = {};
      accumulate(params, walk.batch, row, column, acc[0]);
      FusedEpilogue<Element>(params, walk.batch, column).finish(acc, row, 0);
    }
  }
};

template <typename Row, Major kMajorA, Major kMajorB>
__global__ void __launch_bounds__(Row::kConfig.threads())
    gemm_kernel(const __grid_constant__ GemmParams params) {
  Kernel<Row::kConfig, kMajorA, kMajorB>::run(params);
}

}  // namespace jax_tcgemm::simt
