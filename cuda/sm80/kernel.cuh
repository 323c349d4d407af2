// The sm80 kernel: a persistent grid whose blocks compute one tile of D after the other.
//
// Roles: all warps alike; warp w computes rows (w / warps_n) * warp_m and columns
//        (w % warps_n) * warp_n of a tile.
// Barriers: those of the mainloop. A warp's epilogue reads what the warp itself wrote.
// Timeline: fill the ring; then for each tile: mainloop (sm80/mainloop.cuh), and 16 rows at a time:
//        accumulators to shared memory -> epilogue (epilogue/fused_epilogue.cuh). Meanwhile the
//        ring fills with the next tile.

#pragma once

#include <stdint.h>

#include "epilogue/accumulator_slab.cuh"
#include "epilogue/fused_epilogue.cuh"
#include "gemm_params.h"
#include "kernel_config.h"
#include "scheduler/raster.cuh"
#include "sm80/layouts.h"
#include "sm80/mainloop.cuh"

namespace jax_tcgemm::sm80 {

// A kernel takes several layouts: its mainloops differ by them, while the epilogue, which is as
// much code as they are together, stands in it once. But with as many accumulators as registers
// hold, four mainloops in one kernel would spill.
constexpr bool has_kernel_for_each_major_a(const KernelConfig& config) {
  const int bytes = element_bytes(arithmetic_of(config.algorithm).accumulator);
  const int most = element_bytes(config.algorithm) == 4 ? 64 * 32 : 64 * 64;
  return config.warp_m() * config.warp_n() * bytes >= most * 4;
}

// Call visit(mainloop) with that of the operands: branches that all threads take alike.
template <KernelConfig kConfig, Major kMajorA, typename Visitor>
__device__ __forceinline__ void visit_mainloop(const Layouts& layouts, Visitor&& visit) {
  if (layouts.b == Major::kK) {
    visit(Mainloop<kConfig, kMajorA, Major::kK>());
  } else {
    visit(Mainloop<kConfig, kMajorA, Major::kMn>());
  }
}
template <KernelConfig kConfig, typename Visitor>
__device__ __forceinline__ void visit_mainloop(const Layouts& layouts, Visitor&& visit) {
  if (layouts.a == Major::kK) {
    visit_mainloop<kConfig, Major::kK>(layouts, visit);
  } else {
    visit_mainloop<kConfig, Major::kMn>(layouts, visit);
  }
}

template <KernelConfig kConfig>
struct Kernel {
  using Output = typename AlgorithmTraits<kConfig.algorithm>::Output;
  using Accumulators = WarpAccumulators<kConfig>;
  using Slab = AccumulatorSlab<kConfig.warp_n()>;
  using Epilogue = FusedEpilogue<Output, kVectorColumns, kConfig.epilogue>;

  // How a warp goes over the 16 rows of a slab: whole row segments at a time, some passes together.
  static constexpr int kLanesPerRow = kConfig.warp_n() / kVectorColumns;
  static constexpr int kRowsPerPass = 32 / kLanesPerRow;
  static constexpr int kPasses = Slab::kRows / kRowsPerPass;
  static constexpr int kPassesTogether = kPasses < 4 ? kPasses : 4;
  static_assert(kLanesPerRow <= 32 && kPasses % kPassesTogether == 0);
  static constexpr bool kAny = kConfig.epilogue == EpilogueWork::kAny;

  static __device__ __forceinline__ void finish(const GemmParams& params, const TileWalk& walk,
                                                int warp_row, int warp_column,
                                                const Accumulators& acc, const Slab& slab) {
    const TileCoordinate tile = raster_tile(params.raster, walk.index);
    const int lane_row = threadIdx.x % 32 / kLanesPerRow;
    const int lane_chunk = threadIdx.x % kLanesPerRow;
    const int first_row = tile.tile_m * kConfig.tile_m + warp_row + lane_row;
    const Epilogue epilogue(
        params, walk.batch,
        tile.tile_n * kConfig.tile_n + warp_column + lane_chunk * kVectorColumns);
#pragma unroll 1
    for (int i = 0; i < Accumulators::kMmaM; ++i) {
      acc.store_slab(i, slab);
      __syncwarp();
      const int row = first_row + i * Slab::kRows;
      if (kAny && takes_derivative(params.epilogue.role_of_c)) {
        // One at a time: derivatives of all activations are much code.
        if constexpr (kAny) finish_slab<1, Derivatives::kOnly>(epilogue, slab, row);
      } else {
        finish_slab<kPassesTogether, Derivatives::kNone>(epilogue, slab, row);
      }
      __syncwarp();
    }
  }

  // `row` is that of D for the lane's first of the slab; so many passes together.
  template <int kTogether, Derivatives kDerivatives>
  static __device__ __forceinline__ void finish_slab(const Epilogue& epilogue, const Slab& slab,
                                                     int row) {
    const int lane_row = threadIdx.x % 32 / kLanesPerRow;
    const int lane_chunk = threadIdx.x % kLanesPerRow;
#pragma unroll 1
    for (int pass = 0; pass < kPasses; pass += kTogether) {
      typename Epilogue::Vector value[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        slab.load_vector(value[j], (pass + j) * kRowsPerPass + lane_row, lane_chunk);
      }
      epilogue.template finish<kDerivatives>(value, row + pass * kRowsPerPass, kRowsPerPass);
    }
  }

  // `visit` as visit_mainloop.
  template <typename Visit>
  static __device__ __forceinline__ void run(const GemmParams& params, uint32_t smem,
                                             Visit&& visit) {
    const int warp = threadIdx.x / 32;
    const int warp_row = warp / kConfig.warps_n * kConfig.warp_m();
    const int warp_column = warp % kConfig.warps_n * kConfig.warp_n();
    const Slab slab = {smem + kConfig.ring_bytes() + warp * kConfig.slab_bytes()};
    StreamPosition at = {TileWalk(params), 0, 0, {}, {}, {}, 0};
    visit([&]<typename Main>(Main) { Main::start(params, smem, warp_row, warp_column, at); });
#pragma unroll 1
    for (TileWalk walk(params); !walk.done(params); walk.advance(params)) {
      Accumulators acc;
      visit([&]<typename Main>(Main) { Main::run(params, smem, at, acc); });
      finish(params, walk, warp_row, warp_column, acc, slab);
    }
    ptx::cp_async_wait_group<0>();
  }
};

// Blocks on one SM at least; it caps the registers of a thread. Small accumulators leave room for
// more blocks, which hide each other's prologue and epilogue.
constexpr int min_blocks(const KernelConfig& config) {
  const int accumulators = config.warp_m() * config.warp_n() / 32 * (config.promote ? 2 : 1);
  const int warps_per_sm = accumulators > 32 ? 8 : 12;
  return warps_per_sm * 32 >= config.threads() ? warps_per_sm * 32 / config.threads() : 1;
}

// `Row` carries the configuration as a type: nvcc's host stubs cannot name class-type template
// values. kMajorsA: none or one, that of the operands.
template <typename Row, Major... kMajorsA>
__global__ void __launch_bounds__(Row::kConfig.threads(), min_blocks(Row::kConfig))
    gemm_kernel(const __grid_constant__ GemmParams params,
                const __grid_constant__ Layouts layouts) {
  extern __shared__ __align__(128) char smem[];  // the ring, then the warps' slabs
  Kernel<Row::kConfig>::run(params, ptx::shared_address(smem), [&](auto&& use) {
    visit_mainloop<Row::kConfig, kMajorsA...>(layouts, use);
  });
}

}  // namespace jax_tcgemm::sm80
