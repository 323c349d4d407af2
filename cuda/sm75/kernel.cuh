// The sm75 kernel: a persistent grid. Each block computes one tile of D after the other.
//
// Roles: All warps do the same work. Warp w computes rows (w / warps_n) * warp_m and columns (w %
//        warps_n) * warp_n of a tile.
// Barriers: those of the mainloop, one before and one after the epilogue, whose slabs overlay the
//        stages. A warp's epilogue reads only data that the warp itself wrote.
// Timeline, for each tile: mainloop (sm75/mainloop.cuh), __syncthreads, epilogue
//        (mma_sync/output.cuh), __syncthreads. The other blocks on the SM fill its gaps.

#pragma once

#include <stdint.h>

#include "gemm_params.h"
#include "kernel_config.h"
#include "mma_sync/kernel_of_layouts.cuh"
#include "mma_sync/output.cuh"
#include "ptx/shared_memory.cuh"
#include "scheduler/raster.cuh"
#include "sm75/mainloop.cuh"

namespace jax_tcgemm::sm75 {

template <KernelConfig kConfig>
struct Kernel {
  using Output = mma_sync::WarpOutput<kConfig>;

  // `visit`: as in mma_sync::visit_majors.
  template <typename Visit>
  static __device__ __forceinline__ void run(const GemmParams& params, uint32_t smem,
                                             Visit&& visit) {
    const int warp = threadIdx.x / 32;
    const int warp_row = warp / kConfig.warps_n * kConfig.warp_m();
    const int warp_column = warp % kConfig.warps_n * kConfig.warp_n();
    const typename Output::Slab slab = {smem + warp * kConfig.slab_bytes()};
#pragma unroll 1
    for (TileWalk walk(params); !walk.done(params); walk.advance(params)) {
      const TileCoordinate tile = raster_tile(params.raster, walk.index);
      mma_sync::WarpAccumulators<kConfig> acc;
      visit([&]<typename Layout>(Layout) {
        Mainloop<kConfig, Layout::kA, Layout::kB>::run(params, smem, walk.batch, tile, warp_row,
                                                       warp_column, acc);
      });
      __syncthreads();
      Output::finish(params, walk, warp_row, warp_column, acc, slab);
      __syncthreads();
    }
  }
};

// `Row` and kMajorsA: as in sm80/kernel.cuh.
template <typename Row, Major... kMajorsA>
__global__ void __launch_bounds__(Row::kConfig.threads(), mma_sync::min_blocks(Row::kConfig))
    gemm_kernel(const __grid_constant__ GemmParams params,
                const __grid_constant__ mma_sync::Layouts layouts) {
  extern __shared__ __align__(128) char smem[];  // the stages, or the warps' slabs
  Kernel<Row::kConfig>::run(params, ptx::shared_address(smem),
                            [&](auto&& use) { mma_sync::visit_majors<kMajorsA...>(layouts, use); });
}

}  // namespace jax_tcgemm::sm75
