// Two loaders that bring k-tiles of an operand into the shared-memory ring. Both have the same
// calls:
//   fetch(stage_address, pass)  starts one pass (of Tile::kPasses) of the next k-tile
//   settle(stage_address)       ends what the fetches began and moves on to the k-tile after; the
//                               block sees the data after the ring's wait and __syncthreads()
// A fetch past the last k-tile writes zeros.

#pragma once

#include <stdint.h>

#include "gemm_params.h"
#include "mma_sync/realigned_chunks.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/shared_memory.cuh"
#include "sm80/chunk_cursor.cuh"

namespace jax_tcgemm::sm80 {

// Asynchronous 16-byte copies. Rows start and end on 16-byte boundaries.
template <typename Tile, Major kMajor>
struct CpAsyncLoader {
  using Cursor = ChunkCursor<Tile, kMajor>;

  Cursor cursor;
  uint32_t offset0;     // of pass 0, inside a stage
  int64_t next_k_tile;  // elements from the end of the last pass to pass 0 of the next k-tile

  __device__ __forceinline__ CpAsyncLoader(const Operand&, const LoaderState& state)
      : cursor(state),
        offset0(Tile::offset(cursor.row, cursor.chunk)),
        next_k_tile(kMajor == Major::kK ? cursor.k_step - Tile::kPasses * cursor.row_step : 0) {}

  // Passes come in order. The source is a running pointer, because offsets for each pass would take
  // registers that the accumulators need.
  __device__ __forceinline__ void fetch(uint32_t stage_address, int pass) {
    const uint32_t offset = Tile::pass_offset(offset0, cursor.row, cursor.chunk, pass);
    ptx::cp_async_16(stage_address + offset, cursor.source, cursor.chunk_inside(pass));
    cursor.source += cursor.row_step;
  }

  __device__ __forceinline__ void settle(uint32_t) {
    cursor.source += next_k_tile;
    cursor.count_k_tile();
  }
};

// Copies through registers, for rows of any alignment.
template <typename Tile, Major kMajor>
struct RealignLoader {
  using Element = typename Tile::Element;

  using Cursor = ChunkCursor<Tile, kMajor>;

  Cursor cursor;
  uint32_t offset0;  // of pass 0, inside a stage
  mma_sync::RealignedChunks<Element, Tile::kPasses> chunks;

  __device__ __forceinline__ RealignLoader(const Operand& operand, const LoaderState& state)
      : cursor(state), offset0(Tile::offset(cursor.row, cursor.chunk)), chunks(operand) {}

  __device__ __forceinline__ void fetch(uint32_t, int pass) {
    chunks.fetch(pass, pass_address(pass), cursor.valid_bytes(pass));
  }

  __device__ __forceinline__ void settle(uint32_t stage_address) {
    chunks.fetch_outside([&](int pass) { return pass_address(pass); });
#pragma unroll
    for (int pass = 0; pass < Tile::kPasses; ++pass) {
      uint32_t word[4];
      chunks.read(word, pass, pass_address(pass), cursor.valid_bytes(pass));
      const uint32_t offset = Tile::pass_offset(offset0, cursor.row, cursor.chunk, pass);
      ptx::store_shared_16(stage_address + offset, word);
    }
    cursor.source += cursor.k_step;
    cursor.count_k_tile();
  }

  __device__ __forceinline__ uint64_t pass_address(int pass) const {
    return reinterpret_cast<uint64_t>(cursor.source + pass * cursor.row_step);
  }
};

template <Loader kLoader>
struct LoaderOf {
  template <typename Tile, Major kMajor>
  using type = CpAsyncLoader<Tile, kMajor>;
};

template <>
struct LoaderOf<Loader::kRealign> {
  template <typename Tile, Major kMajor>
  using type = RealignLoader<Tile, kMajor>;
};

}  // namespace jax_tcgemm::sm80
