// The sm75 mainloop: the accumulators of one tile over the whole k, without asynchronous copies.
//
// Roles: every warp copies and every warp multiplies.
// Stages: two k-tiles of A and B in shared memory. While the warps multiply one k-tile, they load
// the next one from global memory to registers and store it from there to the other stage.
// Barriers: one __syncthreads() a k-tile. It makes the next k-tile visible. It also tells that all
// warps have read this k-tile into registers, so that its stage may be overwritten.
//
// Timeline of a warp within a k-tile, in steps of 8 elements of k; columns separated by `|` run at
// the same time:
//   step i      ldmatrix step i + 1                                            | mma of step i
//   last step   k-tile t + 1: registers -> the other stage; k-tile t + 2: global memory ->
//               registers, which have a k-tile's time; __syncthreads
//               ldmatrix step 0 of k-tile t + 1                                | mma of the last

#pragma once

#include <stdint.h>

#include "gemm_params.h"
#include "kernel_config.h"
#include "mma_sync/accumulators.cuh"
#include "mma_sync/operand_tile.cuh"
#include "ptx/mma_sync.cuh"
#include "scheduler/raster.cuh"
#include "sm75/fragments.cuh"
#include "sm75/operand_stream.cuh"

namespace jax_tcgemm::sm75 {

using mma_sync::OperandRole;
using mma_sync::OperandTile;

// The range of k that a matrix of the batch is summed over: all of k, or a part of it.
struct RangeOfK {
  int first;
  int tiles;   // at least 1
  int length;  // of the first k-tile; the others are full

  __device__ __forceinline__ RangeOfK(const GemmParams& params, int batch, int tile_k) : first(0) {
    int end = params.k;
    if (params.split_stages > 0) {
      first = batch * params.split_stages * tile_k;
      end = min(end, first + params.split_stages * tile_k);
    }
    tiles = max(1, (end - first + tile_k - 1) / tile_k);
    length = end - first - (tiles - 1) * tile_k;
  }
};

template <KernelConfig kConfig, Major kMajorA, Major kMajorB>
struct Mainloop {
  using TileA = OperandTile<kConfig, OperandRole::kA, kMajorA>;
  using TileB = OperandTile<kConfig, OperandRole::kB, kMajorB>;
  using Element = typename TileA::Element;
  using StreamA = OperandStream<TileA, kMajorA, kConfig.loader>;
  using StreamB = OperandStream<TileB, kMajorB, kConfig.loader>;
  using FragmentA = Fragment<TileA, kMajorA, kConfig.warp_m()>;
  using FragmentB = Fragment<TileB, kMajorB, kConfig.warp_n()>;
  using Accumulators = mma_sync::WarpAccumulators<kConfig>;
  using Mma = ptx::MmaSyncK8<kConfig.algorithm>;
  static constexpr int kSteps = kConfig.tile_k / 8;
  static_assert(kSteps % 2 == 0 && kConfig.stages == 2);

  struct Fragments {
    FragmentA a;
    FragmentB b;
  };

  StreamA stream_a;
  StreamB stream_b;
  uint32_t stage;          // stage to read
  uint32_t other;          // stage to write
  uint32_t lane_a;         // this lane's place in a stage
  uint32_t lane_b;         // likewise
  Fragments fragments[2];  // of a step and of the next one

  // Computes the sums of one tile of D of matrix `batch`. On return some warps may still read the
  // stages.
  static __device__ __forceinline__ void run(const GemmParams& params, uint32_t smem, int batch,
                                             TileCoordinate tile, int warp_row, int warp_column,
                                             Accumulators& acc) {
    const RangeOfK range(params, batch, kConfig.tile_k);
    const auto matrix = [&](const Operand& operand) {
      return static_cast<const Element*>(operand.data) + batch_offset(params, batch, operand.batch);
    };
    Mainloop self = {StreamA(params.a, matrix(params.a), tile.tile_m * kConfig.tile_m, params.m,
                             range.first, range.length),
                     StreamB(params.b, matrix(params.b), tile.tile_n * kConfig.tile_n, params.n,
                             range.first, range.length),
                     smem,
                     smem + kConfig.stage_bytes(),
                     FragmentA::lane_offset(warp_row),
                     TileA::kBytes + FragmentB::lane_offset(warp_column),
                     {}};
    acc.clear();
    self.fetch();
    self.store(smem);
    if (range.tiles > 1) self.fetch();
    __syncthreads();
    self.load_fragments(0);
#pragma unroll 1
    for (int left = range.tiles; left > 1; --left) self.template k_tile<true>(acc, left > 2);
    self.template k_tile<false>(acc, false);
  }

 private:
  __device__ __forceinline__ void fetch() {
    stream_a.fetch();
    stream_b.fetch();
  }

  __device__ __forceinline__ void store(uint32_t to) {
    stream_a.store(to);
    stream_b.store(to + TileA::kBytes);
  }

  __device__ __forceinline__ void load_fragments(int step) {
    fragments[step % 2].a.load(stage + lane_a, step);
    fragments[step % 2].b.load(stage + lane_b, step);
  }

  // Multiplies a k-tile. If the row promotes, the k-tile's sums are added separately. `fetches`:
  // there is a k-tile after the next one.
  template <bool kHasNext>
  __device__ __forceinline__ void k_tile(Accumulators& acc, bool fetches) {
    if constexpr (kConfig.promote) {
      Accumulators partial;
      partial.clear();
      multiply_k_tile<kHasNext>(partial, fetches);
      acc.add(partial);
    } else {
      multiply_k_tile<kHasNext>(acc, fetches);
    }
  }

  template <bool kHasNext>
  __device__ __forceinline__ void multiply_k_tile(Accumulators& acc, bool fetches) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step + 1 < kSteps) {
        load_fragments(step + 1);
      } else if (kHasNext) {
        store(other);
        if (fetches) fetch();
        __syncthreads();
        const uint32_t written = other;
        other = stage;
        stage = written;
        load_fragments(0);
      }
      multiply(acc, fragments[step % 2]);
    }
  }

  static __device__ __forceinline__ void multiply(Accumulators& acc, const Fragments& f) {
#pragma unroll
    for (int i = 0; i < Accumulators::kMmaM; ++i) {
#pragma unroll
      for (int j = 0; j < Accumulators::kMmaN; ++j) {
        // Serpentine order: neighbouring instructions share a fragment.
        const int column = i % 2 ? Accumulators::kMmaN - 1 - j : j;
        Mma::run(acc.tile[i][column], f.a.reg[2 * i], f.a.reg[2 * i + 1], f.b.reg[column]);
      }
    }
  }
};

}  // namespace jax_tcgemm::sm75
