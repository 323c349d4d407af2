// The buffers in shared memory through which a warp's 16 rows of D leave by TMA, one sub-tile after
// the other. A sub-tile uses a set of buffers, one for each result, D's last. Before that, TMA
// loads the sub-tile's C into D's buffer and its C2 into the first one. It loads as many sub-tiles
// ahead as there are sets. The results then overwrite C and C2. Warps do not wait for one another.
//
//   the warp:    [C -> registers] -> epilogue -> buffers -> fence
//   its lane 0:                                          -> store -> until a set is free [-> C]

#pragma once

#include <stdint.h>

#include "epilogue/accumulator_chunk.cuh"
#include "gemm_params.h"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "sm90/output/output_tile.h"
#include "sm90/output/subtile.cuh"
#include "sm90/ring.cuh"
#include "sm90/tensor_maps.h"

namespace jax_tcgemm::sm90 {

template <KernelConfig kConfig, bool kSwapAb>
struct OutputBuffers {
  static constexpr int kBlocks = kConfig.tile_m / (16 * kConfig.warps_m);
  static constexpr int kBlockChunks = kConfig.output_n() / kChunkColumns;
  static constexpr int kChunks = kBlocks * kBlockChunks;

  const GemmParams& params;
  const TensorMaps& maps;
  const SharedMemory<kConfig>& smem;
  const int warp;
  const int results;      // 1 to 3: the buffers of a set
  int set = 0;            // the next set to be written
  uint32_t c_phases = 0;  // phase of each set's c_full barrier, one bit each
  int row_end = 0;        // end of the tile's group of rows; the warp may write no rows beyond it

  __device__ __forceinline__ OutputBuffers(const GemmParams& params, const TensorMaps& maps,
                                           const SharedMemory<kConfig>& smem)
      : params(params),
        maps(maps),
        smem(smem),
        warp(__shfl_sync(0xffffffff, threadIdx.x / 32, 0)),
        results(1 + (params.epilogue.aux != nullptr) + (params.epilogue.aux2 != nullptr)) {}

  static __device__ __forceinline__ uint32_t lane() { return ptx::volatile_lane(); }

  template <typename Sub>
  __device__ __forceinline__ int sets() const {
    return results == 1 ? Sub::kBuffers : results == 2 ? Sub::kBuffers / 2 : 1;
  }
  // Returns the address of a result's buffer.
  template <typename Sub>
  __device__ __forceinline__ uint32_t address(int set, int result) const {
    return smem.output(warp) + (set * results + result) * Sub::kBytes;
  }

  // Returns the first row and column of a chunk.
  static __device__ __forceinline__ OutputPlace place_of(const OutputPlace& tile, int chunk) {
    const int block = chunk / kBlockChunks;
    const int rest = chunk - block * kBlockChunks;
    return {tile.row + block * kBlockRows, tile.column + rest * kChunkColumns, tile.batch};
  }

  // Called before the mainloop of a tile: starts loading its first C.
  template <typename Sub>
  __device__ __forceinline__ void prefetch_c(const Sub& sub, const OutputPlace& tile) const {
    if (lane() == 0) {
      ptx::tma_store_wait_read<0>();
      const int count = sets<Sub>();
      for (int i = 0; i < count - 1 && i * sub.chunks() < kChunks; ++i) {
        load_c<Sub>(place_of(tile, i * sub.chunks()), set + i < count ? set + i : set + i - count);
      }
    }
    __syncwarp();
  }

  // Waits for the C of the current set before it is read. Its sub-tile begins at `at`.
  template <typename Sub>
  __device__ __forceinline__ void wait_for_c(const OutputPlace& at) {
    // A single set allows no loads ahead of time.
    if (sets<Sub>() == 1 && lane() == 0) {
      ptx::tma_store_wait_read<0>();
      load_c<Sub>(at, set);
    }
    ptx::mbarrier_wait(smem.c_full(warp, set), c_phases >> set & 1);
    c_phases ^= 1 << set;
  }

  // Returns a part of D that begins at `at` and uses all of the warp's buffers
  // (sm90/output/row.cuh).
  template <typename Rows>
  __device__ __forceinline__ Rows rows(const OutputPlace& at) const {
    const int64_t matrix = int64_t{at.batch} * params.m * params.n * Rows::kSize;
    return {static_cast<char*>(params.epilogue.d) + matrix,
            params.m,
            params.n,
            at.row,
            at.column,
            smem.output(warp)};
  }

  // Stores the written rows and waits until the buffers are free.
  template <typename Rows>
  __device__ __forceinline__ void send_rows(const Rows& rows) const {
    ptx::fence_proxy_async();
    __syncwarp();
    rows.send();
    ptx::tma_store_commit();
    ptx::tma_store_wait_read<0>();
    __syncwarp();
  }

  // Returns the number of chunks of a row, with elements of this size, that a warp's buffers hold.
  // Rows lie 16 bytes apart.
  static constexpr int most_row_chunks(int element_bytes) {
    return (kConfig.staging_bytes() / 4 / kWarpRows - kGranule) / (kChunkColumns * element_bytes);
  }

  // Stores the written set to the place where its sub-tile begins, and waits until the next set is
  // free. kCopiesOut: also works if TMA cannot address D.
  template <bool kCopiesOut, typename Sub>
  __device__ __forceinline__ void send(const Sub& sub, const OutputPlace& at) {
    if constexpr (kConfig.grouped == Grouped::kM) {
      if (at.row + kWarpRows > row_end) return copy_rows(sub, at);
    }
    if constexpr (kCopiesOut && kConfig.grouped == Grouped::kNone) {
      if (!maps.d_by_tma) return copy_out(sub, at);
    }
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane() == 0) {
      store<Sub>(maps.d, at, results - 1);
      if (results > 1) store<Sub>(maps.aux, at, 0);
      if (results > 2) store<Sub>(maps.aux2, at, 1);
      ptx::tma_store_commit();
      if (results == 1) {
        ptx::tma_store_wait_read<Sub::kBuffers - 1>();
      } else if (results == 2) {
        ptx::tma_store_wait_read<Sub::kBuffers / 2 - 1>();
      } else {
        ptx::tma_store_wait_read<0>();
      }
    }
    __syncwarp();
    set = set + 1 == sets<Sub>() ? 0 : set + 1;
  }

  // Called after a sub-tile has been sent: starts loading the C of a later sub-tile into the set
  // before that of the sent one. `next` is the first chunk of the next sub-tile.
  template <typename Sub>
  __device__ __forceinline__ void prefetch_next_c(const Sub& sub, const OutputPlace& tile,
                                                  int next) const {
    const int ahead = sets<Sub>() - 1;
    const int chunk = next + (ahead - 1) * sub.chunks();
    if (ahead == 0 || chunk >= kChunks) return;
    if (lane() == 0) {
      ptx::tma_store_wait_read<1>();
      const int target = set + ahead - 1;  // `set` already is that of the next sub-tile
      load_c<Sub>(place_of(tile, chunk), target <= ahead ? target : target - ahead - 1);
    }
    __syncwarp();
  }

  // Sets to zero `rows` rows from `at` on, as far as they belong to the tile's group. A warpgroup
  // calls this.
  __device__ __forceinline__ void clear_rows(const OutputPlace& at, int rows) const {
    const int bytes = element_bytes(params.epilogue.d_type);
    const int chunk_columns = 16 / bytes;
    const int row_chunks = kConfig.tile_n / chunk_columns;
    if (rows > row_end - at.row) rows = row_end - at.row;
#pragma unroll 1
    for (int result = 0; result < results; ++result) {
      char* const matrix = static_cast<char*>(result_matrix(result));
#pragma unroll 1
      for (int i = threadIdx.x % 128; i < rows * row_chunks; i += 128) {
        const int row = at.row + i / row_chunks;
        const int column = at.column + i % row_chunks * chunk_columns;
        if (column >= params.n) continue;
        *reinterpret_cast<uint4*>(matrix + (int64_t{row} * params.n + column) * bytes) = {};
      }
    }
  }

  // Called before the block ends: shared memory must outlive the stores that read it.
  __device__ __forceinline__ void drain() const { ptx::tma_store_wait_read<0>(); }

 private:
  // Calls visit(column, row) with the place in D where a sub-tile's box begins.
  template <typename Visitor>
  static __device__ __forceinline__ void visit_box(const OutputPlace& at, Visitor&& visit) {
    kSwapAb ? visit(at.row, at.column) : visit(at.column, at.row);
  }

  // Lane 0 calls this.
  template <typename Sub>
  __device__ __forceinline__ void store(const TensorMap& map, const OutputPlace& at,
                                        int result) const {
    const int z = kConfig.grouped == Grouped::kM ? 0 : at.batch;
    visit_box(at, [&](int x, int y) { ptx::tma_store(&map, address<Sub>(set, result), x, y, z); });
  }

  // Loads C, and C2 if there is one. Lane 0 calls this.
  template <typename Sub>
  __device__ __forceinline__ void load_c(const OutputPlace& at, int to) const {
    const uint32_t barrier = smem.c_full(warp, to);
    ptx::mbarrier_arrive_expect(barrier, maps.has_c2 ? 2 * Sub::kBytes : Sub::kBytes);
    visit_box(at, [&](int x, int y) {
      const int z = maps.c_moves ? at.batch : 0;
      ptx::tma_load(address<Sub>(to, results - 1), &maps.c, barrier, x, y, z);
      if (maps.has_c2) ptx::tma_load(address<Sub>(to, 0), &maps.c2, barrier, x, y, z);
    });
  }

  // Returns result `i` of a set.
  __device__ __forceinline__ void* result_matrix(int i) const {
    const EpilogueParams& epilogue = params.epilogue;
    return i == results - 1 ? epilogue.d : i == 0 ? epilogue.aux : epilogue.aux2;
  }

  // Writes the group's part of a sub-tile in which a group of rows ends. Threads copy it, which
  // leaves the set free.
  template <typename Sub>
  __device__ __forceinline__ void copy_rows(const Sub& sub, const OutputPlace& at) const {
    constexpr int kRowChunks = Sub::kRowBytes / 16;
    const int rows = row_end - at.row < kWarpRows ? row_end - at.row : kWarpRows;
    const int bytes = sub.wide() ? 4 : 2;
    __syncwarp();
#pragma unroll 1
    for (int result = 0; result < results; ++result) {
      char* const matrix = static_cast<char*>(result_matrix(result));
#pragma unroll 1
      for (int i = lane(); i < rows * kRowChunks; i += 32) {
        const int row = i / kRowChunks;
        const int chunk = i % kRowChunks;
        const int column = at.column + chunk * (16 / bytes);
        if (column >= params.n) continue;
        const int64_t offset = (int64_t{at.row + row} * params.n + column) * bytes;
        uint32_t word[4];
        ptx::load_shared_16(word, address<Sub>(set, result) + Sub::chunk_offset(row, chunk));
        *reinterpret_cast<uint4*>(matrix + offset) = {word[0], word[1], word[2], word[3]};
      }
    }
    __syncwarp();
  }

  // Writes a sub-tile if TMA cannot address D. Threads copy it, which leaves the set free.
  template <typename Sub>
  __device__ __forceinline__ void copy_out(const Sub& sub, const OutputPlace& at) const {
    const int64_t offset = int64_t{at.batch} * params.m * params.n * (sub.wide() ? 4 : 2);
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < results; ++i) {
      visit_box(at, [&](int x, int y) {
        sub.copy_out(address<Sub>(set, i), static_cast<char*>(result_matrix(i)) + offset, params.m,
                     params.n, y, x);
      });
    }
    __syncwarp();
  }
};

}  // namespace jax_tcgemm::sm90
