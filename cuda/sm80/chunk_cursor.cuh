// Places of a thread's part of an operand in global memory, one k-tile after the other.

#pragma once

#include <stdint.h>

#include "kernel_config.h"

namespace jax_tcgemm::sm80 {

// The state of a loader, the same for every layout.
struct LoaderState {
  const void* source;  // this thread's chunk of pass 0 of the k-tile
  int rows_left;       // rows of the operand from this thread's first row on
  int elements_left;   // elements of the operand from this thread's chunk on, along a row
  int64_t row_step;    // elements from one pass to the next
  int64_t k_step;      // elements from one k-tile to the next
  int row, chunk;      // of pass 0, in the tile
};

// Tracks where this thread's chunks of successive k-tiles lie in global memory, and how much of
// each lies inside the operand.
template <typename Tile, Major kMajor>
struct ChunkCursor {
  using Element = typename Tile::Element;

  const Element* source;  // this and the following as in LoaderState
  int rows_left;
  int elements_left;
  int64_t row_step;
  int64_t k_step;
  int row, chunk;

  __device__ __forceinline__ explicit ChunkCursor(const LoaderState& state)
      : source(static_cast<const Element*>(state.source)),
        rows_left(state.rows_left),
        elements_left(state.elements_left),
        row_step(state.row_step),
        k_step(state.k_step),
        row(state.row),
        chunk(state.chunk) {}

  static __device__ __forceinline__ LoaderState initial_state(int64_t ld) {
    return {nullptr,
            0,
            0,
            Tile::kRowStep * ld,
            kMajor == Major::kK ? Tile::kExtentK : Tile::kExtentK * ld,
            static_cast<int>(threadIdx.x / Tile::kChunks),
            static_cast<int>(threadIdx.x % Tile::kChunks)};
  }

  __device__ __forceinline__ LoaderState state() const {
    return {source, rows_left, elements_left, row_step, k_step, row, chunk};
  }

  // Aims at the first k-tile of the tile whose first row (A) or column (B) is `first_mn`.
  __device__ __forceinline__ void aim(const Element* matrix, int64_t ld, int first_mn,
                                      int extent_mn, int extent_k) {
    const int column = chunk * Tile::kChunkElements;
    if constexpr (kMajor == Major::kK) {
      source = matrix + (first_mn + row) * ld + column;
      rows_left = extent_mn - first_mn - row;
      elements_left = extent_k - column;
    } else {
      source = matrix + row * ld + first_mn + column;
      rows_left = extent_k - row;
      elements_left = extent_mn - first_mn - column;
    }
  }

  // Makes all further reads return zeros.
  __device__ __forceinline__ void stop() { elements_left = 0; }

  // Counts one k-tile as done. The loader moves `source`.
  __device__ __forceinline__ void count_k_tile() {
    if constexpr (kMajor == Major::kK) {
      elements_left -= Tile::kExtentK;
    } else {
      rows_left -= Tile::kExtentK;
    }
  }

  __device__ __forceinline__ bool row_inside(int pass) const {
    // Compares anew each time: if kept across the mainloop, the answers for all passes would take
    // registers from the accumulators.
    int left = rows_left;
    asm volatile("" : "+r"(left));
    return pass * Tile::kRowStep < left;
  }

  // Checks if the chunk of `pass` begins inside the operand. Otherwise the chunk reads as zeros.
  __device__ __forceinline__ bool chunk_inside(int pass) const {
    return elements_left > 0 && row_inside(pass);
  }

  // Returns how many bytes (0 to 16) of the chunk of `pass` lie inside the operand.
  __device__ __forceinline__ int valid_bytes(int pass) const {
    const int elements = max(0, min(elements_left, Tile::kChunkElements));
    return row_inside(pass) ? elements * int(sizeof(Element)) : 0;
  }
};

}  // namespace jax_tcgemm::sm80
