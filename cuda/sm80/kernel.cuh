// The sm80 kernel: a persistent grid. Each block computes one tile of D after the other.
//
// Roles: All warps do the same work. Warp w computes rows (w / warps_n) * warp_m and columns (w %
//        warps_n) * warp_n of a tile.
// Barriers: those of the mainloop. A warp's epilogue reads only data that the warp itself wrote.
// Timeline: fill the ring; then for each tile: mainloop (sm80/mainloop.cuh), and 16 rows at a time:
//        accumulators to shared memory -> epilogue (epilogue/fused_epilogue.cuh), or a function
//        (mma_sync/function.cuh). Meanwhile the ring fills with the next tile.

#pragma once

#include <stdint.h>

#include "gemm_params.h"
#include "kernel_config.h"
#include "mma_sync/kernel_of_layouts.cuh"
#include "mma_sync/output.cuh"
#include "scheduler/raster.cuh"
#include "sm80/mainloop.cuh"

namespace jax_tcgemm::sm80 {

// Output: what finishes a warp's sums, mma_sync::WarpOutput or mma_sync::WarpFunction.
template <KernelConfig kConfig, typename Output = mma_sync::WarpOutput<kConfig>>
struct Kernel {
  // `visit`: as in mma_sync::visit_majors.
  template <typename Params, typename Visit>
  static __device__ __forceinline__ void run(const Params& params, uint32_t smem, Visit&& visit) {
    const int warp = threadIdx.x / 32;
    const int warp_row = warp / kConfig.warps_n * kConfig.warp_m();
    const int warp_column = warp % kConfig.warps_n * kConfig.warp_n();
    const typename Output::Slab slab = {smem + kConfig.ring_bytes() + warp * kConfig.slab_bytes()};
    StreamPosition at = {TileWalk(params), 0, 0, {}, {}, {}, 0};
    visit([&]<typename Layout>(Layout) {
      Mainloop<kConfig, Layout::kA, Layout::kB>::start(params, smem, warp_row, warp_column, at);
    });
#pragma unroll 1
    for (TileWalk walk(params); !walk.done(params); walk.advance(params)) {
      mma_sync::WarpAccumulators<kConfig> acc;
      visit([&]<typename Layout>(Layout) {
        Mainloop<kConfig, Layout::kA, Layout::kB>::run(params, smem, at, acc);
      });
      Output::finish(params, walk, warp_row, warp_column, acc, slab);
    }
    ptx::cp_async_wait_group<0>();
  }
};

// `Row` carries the configuration as a type: nvcc's host stubs cannot name class-type template
// values. kMajorsA: none, or one that gives the operands' layout.
template <typename Row, Major... kMajorsA>
__global__ void __launch_bounds__(Row::kConfig.threads(), mma_sync::min_blocks(Row::kConfig))
    gemm_kernel(const __grid_constant__ GemmParams params,
                const __grid_constant__ mma_sync::Layouts layouts) {
  extern __shared__ __align__(128) char smem[];  // the ring, then the warps' slabs
  Kernel<Row::kConfig>::run(params, ptx::shared_address(smem),
                            [&](auto&& use) { mma_sync::visit_majors<kMajorsA...>(layouts, use); });
}

}  // namespace jax_tcgemm::sm80
