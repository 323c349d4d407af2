// The sm80 mainloop: computes the accumulators of one tile after the other, over the whole k.
//
// Roles: every warp copies and every warp multiplies.
// Ring: `stages` k-tiles of A and B in shared memory, (A tile, B tile) each. While the warps
// multiply a k-tile, the next `stages` - 1 are in flight. The stream of k-tiles continues across
// tiles of D: the first k-tiles of a block's next tile are copied while the epilogue of this tile
// runs.
// Barriers: one __syncthreads() a k-tile. It makes the next k-tile visible. It also tells that all
// warps have read this k-tile into registers, so that its stage may be overwritten.
//
// Timeline of a warp within a k-tile, in steps of 32 bytes of k. Columns separated by `|` run at
// the same time: the copies and loads stand between the mma instructions.
//   step 0         fetch k-tile t + stages - 1 | ldmatrix step 1     | mma of step 0
//   step i                                       ldmatrix step i + 1 | mma of step i
//   last step      settle, wait for k-tile t + 1, __syncthreads
//                  ldmatrix step 0 of k-tile t + 1                   | mma of the last step

#pragma once

#include <stdint.h>

#include "gemm_params.h"
#include "kernel_config.h"
#include "mma_sync/accumulators.cuh"
#include "mma_sync/operand_tile.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mma_sync.cuh"
#include "scheduler/raster.cuh"
#include "sm80/fragments.cuh"
#include "sm80/loaders.cuh"

namespace jax_tcgemm::sm80 {

using mma_sync::OperandRole;
using mma_sync::OperandTile;

// Shared-memory addresses of a lane in one stage (see FragmentA and FragmentB).
struct LaneAddress {
  uint32_t a, b;
};

// A warp's position in the stream of k-tiles between two tiles of D, the same for every layout.
struct StreamPosition {
  TileWalk walk;
  int k_tiles_left;
  int write_stage;
  LoaderState a, b;
  LaneAddress base;  // in the next stage to be read
  int read_stage;
};

template <KernelConfig kConfig, Major kMajorA, Major kMajorB>
struct Mainloop {
  using TileA = OperandTile<kConfig, OperandRole::kA, kMajorA>;
  using TileB = OperandTile<kConfig, OperandRole::kB, kMajorB>;
  using Element = typename TileA::Element;
  template <typename Tile, Major kMajor>
  using Loader = typename LoaderOf<kConfig.loader>::template type<Tile, kMajor>;
  using FragA = FragmentA<TileA, kMajorA, kConfig.warp_m()>;
  using FragB = FragmentB<TileB, kMajorB, kConfig.warp_n()>;
  using Accumulators = mma_sync::WarpAccumulators<kConfig>;
  using Mma = ptx::MmaSync<kConfig.algorithm>;
  static constexpr int kMmaM = FragA::kMmaTiles;
  static constexpr int kMmaN = FragB::kMmaTiles;
  static constexpr int kSteps = kConfig.tile_k * element_bytes(kConfig.algorithm) / 32;
  static constexpr int kStages = kConfig.stages;
  // The loads of a step are spread over this many of its mma rows, early enough to arrive in time.
  static constexpr int kLoadRows = kMmaM > 1 ? kMmaM / 2 : 1;
  // Loaded fragments are rounded (tf32) during the last kRoundRows mma rows.
  static constexpr int kRoundRows = kMmaM > 1 ? kMmaM / 2 : 1;

  // The stream of k-tiles: its current tile of D, the two loaders and the stage to write.
  struct Pipeline {
    const GemmParams& params;
    uint32_t smem;  // (stages, A tile then B tile)
    TileWalk walk;
    int k_tiles_left;  // of the stream's current tile
    int write_stage;
    Loader<TileA, kMajorA> load_a;
    Loader<TileB, kMajorB> load_b;

    __device__ __forceinline__ Pipeline(const GemmParams& params, uint32_t smem,
                                        const StreamPosition& at)
        : params(params),
          smem(smem),
          walk(at.walk),
          k_tiles_left(at.k_tiles_left),
          write_stage(at.write_stage),
          load_a(params.a, at.a),
          load_b(params.b, at.b) {}

    // Saves the stream's position without that of its reader.
    __device__ __forceinline__ void save(StreamPosition& at) const {
      at.walk = walk;
      at.k_tiles_left = k_tiles_left;
      at.write_stage = write_stage;
      at.a = load_a.cursor.state();
      at.b = load_b.cursor.state();
    }

    __device__ __forceinline__ int k_tiles() const {
      return max(1, (params.k + kConfig.tile_k - 1) / kConfig.tile_k);
    }

    // Counts `count` settled k-tiles of the current tile. After the tile's last k-tile the stream
    // moves to the next tile.
    __device__ __forceinline__ void count(int count) {
      k_tiles_left -= count;
      if (k_tiles_left > 0) return;
      walk.advance(params);
      aim();
    }

    __device__ __forceinline__ void aim() {
      k_tiles_left = k_tiles();
      if (walk.done(params)) {
        load_a.cursor.stop();
        load_b.cursor.stop();
        return;
      }
      const TileCoordinate tile = raster_tile(params.raster, walk.index);
      const auto matrix = [&](const Operand& operand) {
        return static_cast<const Element*>(operand.data) +
               batch_offset(params, walk.batch, operand.batch);
      };
      load_a.cursor.aim(matrix(params.a), params.a.ld, tile.tile_m * kConfig.tile_m, params.m,
                        params.k);
      load_b.cursor.aim(matrix(params.b), params.b.ld, tile.tile_n * kConfig.tile_n, params.n,
                        params.k);
    }

    __device__ __forceinline__ uint32_t write_address() const {
      return smem + write_stage * kConfig.stage_bytes();
    }

    // Starts the `part`-th of `parts` equal shares of the copies of a k-tile.
    __device__ __forceinline__ void fetch_part(int part, int parts) {
      constexpr int kPasses = TileA::kPasses + TileB::kPasses;
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        if (i * parts / kPasses != part) continue;
        if (i < TileA::kPasses) {
          load_a.fetch(write_address(), i);
        } else {
          load_b.fetch(write_address() + TileA::kBytes, i - TileA::kPasses);
        }
      }
    }
    // Ends a k-tile's copies and moves on to the next k-tile.
    __device__ __forceinline__ void settle() {
      load_a.settle(write_address());
      load_b.settle(write_address() + TileA::kBytes);
      ptx::cp_async_commit_group();
      write_stage = write_stage == kStages - 1 ? 0 : write_stage + 1;
    }
  };

  // The fragments of one mma step.
  struct Fragments {
    FragA a;
    FragB b;
  };

  // Does the `part`-th of `parts` equal shares of the loads of a step.
  static __device__ __forceinline__ void load_part(Fragments& fragments, LaneAddress base, int step,
                                                   int part, int parts) {
    constexpr int kLoads = FragA::kLoads + FragB::kLoads;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (i * parts / kLoads != part) continue;
      if (i < FragA::kLoads) {
        fragments.a.load(base.a, step, i);
      } else {
        fragments.b.load(base.b, step, i - FragA::kLoads);
      }
    }
  }

  // Rounds the `part`-th of `parts` equal shares of a step's fragments to tf32.
  static __device__ __forceinline__ void round_part(Fragments& f, int part, int parts) {
    if constexpr (TileA::kIsTf32) {
#pragma unroll
      for (int i = 0; i < kMmaM; ++i) {
        if (i * parts / kMmaM != part) continue;
#pragma unroll
        for (uint32_t& value : f.a.reg[i]) ptx::round_to_tf32(value);
      }
#pragma unroll
      for (int j = 0; j < kMmaN; ++j) {
        if (j * parts / kMmaN != part) continue;
#pragma unroll
        for (uint32_t& value : f.b.reg[j]) ptx::round_to_tf32(value);
      }
    }
  }

  // Multiplies rows 16 * i .. 16 * i + 15 of a step.
  static __device__ __forceinline__ void multiply_row(Accumulators& acc, const Fragments& f,
                                                      int i) {
#pragma unroll
    for (int j = 0; j < kMmaN; ++j) {
      // Serpentine order: neighbouring instructions share a fragment.
      const int column = i % 2 ? kMmaN - 1 - j : j;
      Mma::run(acc.tile[i][column], f.a.reg[i], f.b.reg[column]);
    }
  }

  // Reads the ring.
  struct Reader {
    LaneAddress base;  // in the stage being read
    int stage;

    // Waits for the next k-tile.
    static __device__ __forceinline__ void wait() {
      ptx::cp_async_wait_group<kStages - 2>();
      __syncthreads();
    }

    __device__ __forceinline__ void advance() {
      const bool wrap = stage == kStages - 1;
      const int bytes = wrap ? -(kStages - 1) * kConfig.stage_bytes() : kConfig.stage_bytes();
      stage = wrap ? 0 : stage + 1;
      base = {base.a + bytes, base.b + bytes};
    }
  };

  // Fills the ring, beginning with the first tile of D. `warp_row`, `warp_column`: first row and
  // column of the warp's part in a tile.
  static __device__ __forceinline__ void start(const GemmParams& params, uint32_t smem,
                                               int warp_row, int warp_column, StreamPosition& at) {
    at.a = Loader<TileA, kMajorA>::Cursor::initial_state(params.a.ld);
    at.b = Loader<TileB, kMajorB>::Cursor::initial_state(params.b.ld);
    Pipeline pipeline(params, smem, at);
    pipeline.aim();
#pragma unroll 1
    for (int s = 0; s < kStages - 1; ++s) {
      pipeline.fetch_part(0, 1);
      pipeline.settle();
      pipeline.count(1);
    }
    pipeline.save(at);
    at.base = {smem + FragA::lane_offset(warp_row),
               smem + TileA::kBytes + FragB::lane_offset(warp_column)};
    Reader::wait();
  }

  // Accumulates one tile. At its end the warp has read the fragments of one more k-tile, the first
  // of the next tile of D. The next tile's run() reads them again, because they would take
  // registers from the epilogue. The stream may move to the next tile of D during this call. That
  // step is outside of the loop over k-tiles, which has no registers to spare.
  static __device__ __forceinline__ void run(const GemmParams& params, uint32_t smem,
                                             StreamPosition& at, Accumulators& acc) {
    Pipeline pipeline(params, smem, at);
    Reader reader = {at.base, at.read_stage};
    Fragments fragments[2];  // (register buffers)
    load_part(fragments[0], reader.base, 0, 0, 1);
    round_part(fragments[0], 0, 1);
    acc.clear();
    int left = pipeline.k_tiles();
#pragma unroll 1
    while (left > 0) {
      const int count = min(left, pipeline.k_tiles_left);
#pragma unroll 1
      for (int t = 0; t < count; ++t) {
        if constexpr (kConfig.promote) {
          Accumulators partial;
          partial.clear();
          multiply_k_tile(partial, fragments, pipeline, reader);
          acc.add(partial);
        } else {
          multiply_k_tile(acc, fragments, pipeline, reader);
        }
      }
      pipeline.count(count);
      left -= count;
    }
    pipeline.save(at);
    at.base = reader.base;
    at.read_stage = reader.stage;
  }

  static __device__ __forceinline__ void multiply_k_tile(Accumulators& acc,
                                                         Fragments (&fragments)[2],
                                                         Pipeline& pipeline, Reader& reader) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int next = (step + 1) % kSteps;
      if (next == 0) {
        pipeline.settle();
        reader.wait();
        reader.advance();
      }
#pragma unroll
      for (int i = 0; i < kMmaM; ++i) {
        if (i < kLoadRows) {
          load_part(fragments[(step + 1) % 2], reader.base, next, i, kLoadRows);
        }
        if (step == 0) pipeline.fetch_part(i, kMmaM);
        multiply_row(acc, fragments[step % 2], i);
        if (i >= kMmaM - kRoundRows) {
          round_part(fragments[(step + 1) % 2], i - (kMmaM - kRoundRows), kRoundRows);
        }
      }
    }
  }
};

}  // namespace jax_tcgemm::sm80
