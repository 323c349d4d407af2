// The simt kernel: for products too small for a pipeline. It has no shared memory, no barrier and
// little code, because at this size the time goes into fetching instructions and into one trip to
// memory.
//
// Roles: A thread computes one element of a tile of (tile_m, tile_n) of D by float32 FMA over the
//        whole k. Neighbouring threads compute neighbouring columns.
// Barriers: none.
// Timeline: loads of tile_k steps of k in flight together -> FMA -> ... -> epilogue.

#pragma once

#include <stdint.h>

#include "common/dtype.cuh"
#include "epilogue/fused_epilogue.cuh"
#include "gemm_params.h"
#include "kernel_config.h"
#include "scheduler/raster.cuh"
#include "simt/dot.cuh"

namespace jax_tcgemm::simt {

template <KernelConfig kConfig, bool kMajorA, bool kMajorB>
struct Kernel {
  using Input = typename AlgorithmTraits<kConfig.algorithm>::Input;
  using Output = typename AlgorithmTraits<kConfig.algorithm>::Output;

  static __device__ __forceinline__ void run(const GemmParams& params) {
#pragma unroll 1
    for (TileWalk walk(params); !walk.done(params); walk.advance(params)) {
      const TileCoordinate tile = raster_tile(params.raster, walk.index);
      const int row = tile.tile_m * kConfig.tile_m + threadIdx.x / kConfig.tile_n;
      const int column = tile.tile_n * kConfig.tile_n + threadIdx.x % kConfig.tile_n;
      if (row >= params.m || column >= params.n) continue;
      Vector<1> value[1];
      value[0][0] =
          dot<kConfig.tile_k, Input>({params, params.a, kMajorA, walk.batch, row},
                                     {params, params.b, kMajorB, walk.batch, column}, params.k);
      FusedEpilogue<Output, 1>(params, walk.batch, column).finish(value, row, 0);
    }
  }
};

template <typename Row, Major kMajorA, Major kMajorB>
__global__ void __launch_bounds__(Row::kConfig.threads())
    gemm_kernel(const __grid_constant__ GemmParams params) {
  Kernel<Row::kConfig, kMajorA == Major::kK, kMajorB == Major::kK>::run(params);
}

}  // namespace jax_tcgemm::simt
