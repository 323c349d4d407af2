// The producer: one thread that keeps the ring full of tiles of both operands by TMA.

#pragma once

#include <stdint.h>

#include "gemm_params.h"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "scheduler/raster.cuh"
#include "sm90/output/output_tile.h"
#include "sm90/ring.cuh"
#include "sm90/tensor_maps.h"

namespace jax_tcgemm::sm90 {

// Coordinates of a matrix in an operand's batch dimensions.
struct BatchCoordinates {
  int z, u, v;
};

__device__ __forceinline__ BatchCoordinates
batch_coordinates(const GemmParams& params, int batch, const uint8_t (&moves)[kMaxBatchRank]) {
  int index[3] = {batch, 0, 0};
#pragma unroll
  for (int i = 2; i > 0; --i) {
    if (i < params.batch_rank) {
      const int outer = index[0] / params.batch_shape[i];
      index[i] = index[0] - outer * params.batch_shape[i];
      index[0] = outer;
    }
  }
  return {moves[0] ? index[0] : 0, moves[1] ? index[1] : 0, moves[2] ? index[2] : 0};
}

// Loads a (kTileMn, tile_k) tile of one operand. Each of kSharers blocks fetches a part for all of
// them. kPairs: the operand holds complex numbers, half as many along k.
template <KernelConfig kConfig, int kTileMn, Major kMajor, int kSharers, bool kPairs = false>
struct OperandLoader {
  // Rows along k in a tile of an mn-major operand.
  static constexpr int kTileRows = kPairs ? kConfig.tile_k / 2 : kConfig.tile_k;
  const TensorMap* map;
  bool many_batch_dimensions;
  int share;
  uint16_t sharers;
  int first;  // along m or n
  BatchCoordinates batch;

  __device__ __forceinline__ void copy(uint32_t shared, uint32_t barrier, int x, int y) const {
    if constexpr (kSharers == 1) {
      if (!many_batch_dimensions) {
        ptx::tma_load(shared, map, barrier, x, y, batch.z);
      } else {
        ptx::tma_load(shared, map, barrier, x, y, batch.z, batch.u, batch.v);
      }
    } else {
      if (!many_batch_dimensions) {
        ptx::tma_load_multicast(shared, map, barrier, sharers, x, y, batch.z);
      } else {
        ptx::tma_load_multicast(shared, map, barrier, sharers, x, y, batch.z, batch.u, batch.v);
      }
    }
  }

  __device__ __forceinline__ void load(uint32_t shared, uint32_t barrier, int k) const {
    if constexpr (kMajor == Major::kK) {
      // TMA swizzles by the address, so a share may begin and end within a pattern of 8 rows.
      constexpr int kRows = kTileMn / kSharers;
      copy(shared + share * kRows * 128, barrier, k, first + share * kRows);
    } else {
      constexpr int kWidth = 128 / element_bytes(kConfig.algorithm);
      constexpr int kSlabs = (kTileMn + kWidth - 1) / kWidth;
      // Each sharer fetches whole slabs if they divide evenly, else some k of every slab.
      constexpr bool kWhole = kSlabs % kSharers == 0;
      constexpr int kRows = kWhole ? kTileRows : kTileRows / kSharers;
      const int first_row = kPairs ? k / 2 : k;
      constexpr int kCopies = kWhole ? kSlabs / kSharers : kSlabs;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int slab = kWhole ? share * kCopies + i : i;
        const int row = kWhole ? 0 : share * kRows;
        copy(shared + (slab * kConfig.tile_k + row) * 128, barrier, first + slab * kWidth,
             first_row + row);
      }
    }
  }
};

template <KernelConfig kConfig, typename Layout>
struct Producer {
  static constexpr Major kMajorA = Layout::kMajorA;
  static constexpr Major kMajorB = Layout::kMajorB;
  using LoaderA = OperandLoader<kConfig, kConfig.tile_m, kMajorA, kConfig.cluster_n, kConfig.pairs>;
  using LoaderB = OperandLoader<kConfig, kConfig.output_n(), kMajorB, kConfig.cluster_m>;
  static constexpr int kStages = ring_stages(kConfig, kMajorA, kMajorB);
  using Position = RingPosition<kStages>;

  // One thread calls this.
  static __device__ __forceinline__ void run(const GemmParams& params, const TensorMaps& maps,
                                             const SharedMemory<kConfig>& smem,
                                             const ClusterPlace<kConfig>& place) {
    const int k_tiles = (params.k - 1) / kConfig.tile_k + 1;
    const bool many = params.batch_rank > 1;
    LoaderA a = {&maps.a, many, place.n, place.sharers_of_a(), 0, {}};
    LoaderB b = {&maps.b, many, place.m, place.sharers_of_b(), 0, {}};
    LoaderB b2 = b;
    b2.map = &maps.b2;
    Position at;
    uint32_t partial_phase = 1;
#pragma unroll 1
    for (TileWalk walk(params, blockIdx.x / kConfig.cluster_size()); !walk.done(params);
         walk.advance(params)) {
      if constexpr (kConfig.split_k > 1) {
        ptx::mbarrier_wait_cluster(smem.partial_empty(), partial_phase);
        partial_phase ^= 1;
        // Other blocks read this ring by ordinary loads, and their fences order only their own
        // memory.
        ptx::fence_proxy_async();
      }
      const TileCoordinate tile = raster_tile(params.raster, walk.index);
      a.first = (tile.tile_m * kConfig.cluster_m + place.m) * kConfig.tile_m;
      b2.first = b.first = (tile.tile_n * kConfig.cluster_n + place.n) * kConfig.output_n();
      a.batch = batch_coordinates(params, walk.batch, maps.a_moves);
      b2.batch = b.batch = batch_coordinates(params, walk.batch, maps.b_moves);
      const auto range = place.k_range(k_tiles, params.split_stages, walk.batch);
#pragma unroll 1
      for (int k = range.begin; k < range.end; ++k, at.advance()) {
        ptx::mbarrier_wait(smem.empty(at.stage), at.phase ^ 1);
        ptx::mbarrier_arrive_expect(smem.full(at.stage), stage_bytes(params));
        const int first_k = k_tile_of(params.planes, k) * kConfig.tile_k;
        a.load(smem.a(at.stage), smem.full(at.stage), first_k);
        b.load(smem.b(at.stage), smem.full(at.stage), first_k);
        if constexpr (kConfig.gated) {
          constexpr int kHalf = kConfig.operand_bytes(kConfig.tile_n) / 2;
          b2.load(smem.b(at.stage) + kHalf, smem.full(at.stage), k * kConfig.tile_k);
        }
      }
    }
    drain(smem, at);
    if constexpr (kConfig.split_k > 1) {
      ptx::mbarrier_wait_cluster(smem.partial_empty(), partial_phase);
    }
  }

  // Waits until every loaded stage has been read. `at` is the position after the last stage.
  // Arrivals from other blocks must not come after this block has ended.
  static __device__ __forceinline__ void drain(const SharedMemory<kConfig>& smem, Position at) {
    if constexpr (kConfig.cluster_size() > 1) {
#pragma unroll 1
      for (int i = 0; i < kStages; ++i, at.advance()) {
        ptx::mbarrier_wait(smem.empty(at.stage), at.phase ^ 1);
      }
    }
  }

 private:
  // Returns the k-tile of stage k in the operands. Planes take turns: the last plane of each k-tile
  // comes first.
  static __device__ __forceinline__ int k_tile_of(const Planes& planes, int k) {
    if constexpr (kConfig.planes) {
      const int tile = k / planes.count;
      const int plane = (tile + 1) * planes.count - 1 - k;
      return plane * planes.k_tiles + tile;
    }
    return k;
  }

  // Bytes of an operand in a stage. TMA loads mn-major operands in whole rows.
  static constexpr int bytes(int tile_mn, Major major) {
    return major == Major::kK ? tile_mn * 128 : kConfig.operand_bytes(tile_mn);
  }

  static __device__ __forceinline__ int stage_bytes(const GemmParams& params) {
    if constexpr (element_bytes(kConfig.algorithm) == 1) {
      const auto rows = [](int extent, int tile, int sharers) {
        return loaded_rows(kConfig, extent, tile, sharers);
      };
      const int of_b = rows(params.n, kConfig.output_n(), kConfig.cluster_m);
      return (rows(params.m, kConfig.tile_m, kConfig.cluster_n) + of_b * (kConfig.gated ? 2 : 1)) *
             128;
    } else {
      return kStageBytes;
    }
  }

 public:
  // Bytes that arrive in a stage.
  static constexpr int kStageBytes =
      bytes(kConfig.tile_m, kMajorA) / (kConfig.pairs ? 2 : 1) + bytes(kConfig.tile_n, kMajorB);
};

}  // namespace jax_tcgemm::sm90
