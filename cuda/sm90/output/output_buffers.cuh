// The buffers in shared memory through which a warp's 16 rows of D leave by TMA, sub-tile after
// sub-tile. A sub-tile takes a set of buffers, one for each result, D's last; what it reads of C
// was loaded into the same buffers before, C into D's and C2 into the first, as far ahead as there
// are sets, and gives way to the results. Warps do not wait for one another.
//
//   the warp:    [C -> registers] -> epilogue -> buffers -> fence
//   its lane 0:                                          -> store -> until a set is free [-> C]

#pragma once

#include <stdint.h>

#include "gemm_params.h"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "sm90/output/output_tile.h"
#include "sm90/output/subtile.cuh"
#include "sm90/ring.cuh"
#include "sm90/tensor_maps.h"

namespace jax_tcgemm::sm90 {

// Where accumulators belong: their first row and column, of D or of D^T.
struct OutputPlace {
  int row;
  int column;
  int batch;
};

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
  int set = 0;            // the next one to be written
  uint32_t c_phases = 0;  // of each set's c_full barrier, a bit each
  int row_end = 0;        // of the tile's group of rows, which are all that it may write

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
  // The buffer of a result.
  template <typename Sub>
  __device__ __forceinline__ uint32_t address(int set, int result) const {
    return smem.output(warp) + (set * results + result) * Sub::kBytes;
  }

  // First row and column of a chunk.
  static __device__ __forceinline__ OutputPlace place_of(const OutputPlace& tile, int chunk) {
    const int block = chunk / kBlockChunks;
    const int rest = chunk - block * kBlockChunks;
    return {tile.row + block * kBlockRows, tile.column + rest * kChunkColumns, tile.batch};
  }

  // Before the mainloop of a tile: sends for its first C.
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

  // Before C is read from the set, whose sub-tile begins at `at`.
  template <typename Sub>
  __device__ __forceinline__ void wait_for_c(const OutputPlace& at) {
    // With a single set nothing could be sent for ahead of time.
    if (sets<Sub>() == 1 && lane() == 0) {
      ptx::tma_store_wait_read<0>();
      load_c<Sub>(at, set);
    }
    ptx::mbarrier_wait(smem.c_full(warp, set), c_phases >> set & 1);
    c_phases ^= 1 << set;
  }

  // A part of D that begins at `at`, in all of the warp's buffers: see sm90/output/row.cuh.
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

  // When they are written: stores them, and waits until the buffers are free.
  template <typename Rows>
  __device__ __forceinline__ void send_rows(const Rows& rows) const {
    ptx::fence_proxy_async();
    __syncwarp();
    rows.send();
    ptx::tma_store_commit();
    ptx::tma_store_wait_read<0>();
    __syncwarp();
  }

  // Chunks of a row of so large elements that a warp's buffers hold, 16 bytes of each row apart.
  static constexpr int most_row_chunks(int element_bytes) {
    return (kConfig.staging_bytes() / 4 / kWarpRows - kGranule) / (kChunkColumns * element_bytes);
  }

  // When the set is written: stores it to where its sub-tile begins, and waits until the next set
  // is free. kCopiesOut: also where TMA cannot address D.
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

  // After a sub-tile has been sent: sends for the C of a later one, into the set before it. `next`
  // is the first chunk of the next sub-tile.
  template <typename Sub>
  __device__ __forceinline__ void prefetch_next_c(const Sub& sub, const OutputPlace& tile,
                                                  int next) const {
    const int ahead = sets<Sub>() - 1;
    const int chunk = next + (ahead - 1) * sub.chunks();
    if (ahead == 0 || chunk >= kChunks) return;
    if (lane() == 0) {
      ptx::tma_store_wait_read<1>();
      const int target = set + ahead - 1;  // `set` is that of the next sub-tile by now
      load_c<Sub>(place_of(tile, chunk), target <= ahead ? target : target - ahead - 1);
    }
    __syncwarp();
  }

  // Sets the rows of the tile's group, of `rows` that begin at `at`, to zero. By a warpgroup.
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

  // Before the block ends: shared memory must outlive the stores that read it.
  __device__ __forceinline__ void drain() const { ptx::tma_store_wait_read<0>(); }

 private:
  // Calls visit(column, row) with where the box of a sub-tile begins in D.
  template <typename Visitor>
  static __device__ __forceinline__ void visit_box(const OutputPlace& at, Visitor&& visit) {
    kSwapAb ? visit(at.row, at.column) : visit(at.column, at.row);
  }

  // By lane 0.
  template <typename Sub>
  __device__ __forceinline__ void store(const TensorMap& map, const OutputPlace& at,
                                        int result) const {
    const int z = kConfig.grouped == Grouped::kM ? 0 : at.batch;
    visit_box(at, [&](int x, int y) { ptx::tma_store(&map, address<Sub>(set, result), x, y, z); });
  }

  // By lane 0: C, and C2 where there is one.
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

  // Result `i` of a set.
  __device__ __forceinline__ void* result_matrix(int i) const {
    const EpilogueParams& epilogue = params.epilogue;
    return i == results - 1 ? epilogue.d : i == 0 ? epilogue.aux : epilogue.aux2;
  }

  // Where a group of rows ends: what belongs to it, by threads, which leave the set free.
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

  // Where TMA cannot address D: by threads, which leave the set free.
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
