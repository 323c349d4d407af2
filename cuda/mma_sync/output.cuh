// The end of a tile of mma.sync: a warp's sums go to shared memory and to the epilogue, 16 rows at
// a time.
//
// Barriers: none. A warp reads only data that the warp itself wrote.

#pragma once

#include <stdint.h>

#include "common/dtype.cuh"
#include "epilogue/accumulator_slab.cuh"
#include "epilogue/fused_epilogue.cuh"
#include "epilogue/known.cuh"
#include "gemm_params.h"
#include "kernel_config.h"
#include "mma_sync/accumulators.cuh"
#include "scheduler/raster.cuh"

namespace jax_tcgemm::mma_sync {

template <KernelConfig kConfig>
struct WarpOutput {
  using Element = typename AlgorithmTraits<kConfig.algorithm>::Output;
  using Accumulators = WarpAccumulators<kConfig>;
  using Slab = AccumulatorSlab<kConfig.warp_n()>;
  using Epilogue = FusedEpilogue<Element, kVectorColumns, kConfig.epilogue>;

  // A warp processes the 16 rows of a slab in whole row segments, kPassesTogether passes at once.
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
      if (kAny && takes_derivative(known_role_of_c(params.epilogue))) {
        // One pass at a time, because the derivatives of all activations are much code.
        if constexpr (kAny) finish_slab<1, Derivatives::kOnly>(epilogue, slab, row);
      } else {
        finish_slab<kPassesTogether, Derivatives::kNone>(epilogue, slab, row);
      }
      __syncwarp();
    }
  }

  // `row` is the row of D for the lane's first row in the slab. kTogether passes run together.
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
};

}  // namespace jax_tcgemm::mma_sync
