// Two ways to bring k-tiles of an operand into the shared-memory ring. Both have the same calls:
//   fetch(stage_address, pass)  starts on one pass (of Tile::kPasses) of the next k-tile
//   settle(stage_address)       ends what the fetches began and moves on to the k-tile after; the
//                               block sees the data after the ring's wait and __syncthreads()
// A fetch past the last k-tile brings zeros.

#pragma once

#include <stdint.h>

#include "common/realign.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/global_memory.cuh"
#include "ptx/shared_memory.cuh"
#include "sm80/operand_tile.cuh"

namespace jax_tcgemm::sm80 {

// Asynchronous 16-byte copies. Rows start and end on 16-byte boundaries.
template <typename Tile, Major kMajor>
struct CpAsyncLoader {
  using Cursor = ChunkCursor<Tile, kMajor>;

  Cursor cursor;
  uint32_t offset0;     // of pass 0 inside a stage
  int64_t next_k_tile;  // elements from behind the last pass to pass 0 of the next k-tile

  __device__ __forceinline__ CpAsyncLoader(const Operand&, const LoaderState& state)
      : cursor(state),
        offset0(Tile::offset(cursor.row, cursor.chunk)),
        next_k_tile(kMajor == Major::kK ? cursor.k_step - Tile::kPasses * cursor.row_step : 0) {}

  // Passes come in order: the source is a running pointer, since offsets kept for each pass would
  // cost the registers that the accumulators need.
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

// Copies through registers for rows of any alignment: two aligned 16-byte loads cover a chunk, a
// funnel shift moves it into place.
template <typename Tile, Major kMajor>
struct RealignLoader {
  using Element = typename Tile::Element;

  using Cursor = ChunkCursor<Tile, kMajor>;

  Cursor cursor;
  uint32_t offset0;      // of pass 0 inside a stage
  uint64_t begin, end;   // addresses that may be read
  uint32_t outside = 0;  // bit 2 * pass (+ 1): that pass's low (high) granule sticks out of them
  uint32_t low[Tile::kPasses][4];
  uint32_t high[Tile::kPasses][4];

  __device__ __forceinline__ RealignLoader(const Operand& operand, const LoaderState& state)
      : cursor(state),
        offset0(Tile::offset(cursor.row, cursor.chunk)),
        begin(reinterpret_cast<uint64_t>(operand.data)),
        end(reinterpret_cast<uint64_t>(operand.data) + operand.span * sizeof(Element)) {}

  __device__ __forceinline__ void fetch(uint32_t, int pass) {
    const uint64_t address = pass_address(pass);
    const uint64_t granule = address & ~uint64_t{15};
    const int bytes = cursor.valid_bytes(pass);
    const bool want_low = bytes > 0;
    const bool want_high = static_cast<int>(address & 15) + bytes > 16;
    const bool low_inside = granule >= begin && granule + 16 <= end;
    const bool high_inside = granule + 32 <= end;
    ptx::load_global_16_if(low[pass], granule, want_low && low_inside);
    ptx::load_global_16_if(high[pass], granule + 16, want_high && high_inside);
    outside |= (want_low && !low_inside) << (2 * pass);
    outside |= (want_high && !high_inside) << (2 * pass + 1);
  }

  __device__ __forceinline__ void settle(uint32_t stage_address) {
    if (outside) fetch_outside();
#pragma unroll
    for (int pass = 0; pass < Tile::kPasses; ++pass) {
      uint32_t word[4];
      funnel<Element>(word, low[pass], high[pass], pass_address(pass) & 15);
      const int bytes = cursor.valid_bytes(pass);
      if (bytes < 16) keep_leading_bytes(word, bytes);
      const uint32_t offset = Tile::pass_offset(offset0, cursor.row, cursor.chunk, pass);
      ptx::store_shared_16(stage_address + offset, word);
    }
    cursor.source += cursor.k_step;
    cursor.count_k_tile();
  }

  __device__ __forceinline__ uint64_t pass_address(int pass) const {
    return reinterpret_cast<uint64_t>(cursor.source + pass * cursor.row_step);
  }

  // The first and the last granule of an operand, element by element.
  __device__ __forceinline__ void fetch_outside() {
#pragma unroll
    for (int pass = 0; pass < Tile::kPasses; ++pass) {
      const uint64_t granule = pass_address(pass) & ~uint64_t{15};
      if (outside >> (2 * pass) & 1) load_elements<Element>(low[pass], granule, begin, end);
      if (outside >> (2 * pass + 1) & 1)
        load_elements<Element>(high[pass], granule + 16, begin, end);
    }
    outside = 0;
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
