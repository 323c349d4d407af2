// Streams an operand's k-tiles from global memory to registers, and from there to shared memory, 16
// bytes at a time.
//
// The first k-tile has the remainder of k, so the others are full and need no checks along k. Calls
// for each k-tile: fetch() starts the loads. store() writes the loaded data and moves on. The block
// sees the data after the next __syncthreads().

#pragma once

#include <stdint.h>

#include "gemm_params.h"
#include "kernel_config.h"
#include "mma_sync/realigned_chunks.cuh"
#include "ptx/global_memory.cuh"
#include "ptx/shared_memory.cuh"

namespace jax_tcgemm::sm75 {

// A thread's chunks in flight, for rows on 16-byte boundaries ...
template <Loader kLoader, typename Element, int kPasses>
struct Chunks {
  static_assert(kLoader == Loader::kRegister);
  uint32_t word[kPasses][4];

  __device__ __forceinline__ explicit Chunks(const Operand&) {}
  __device__ __forceinline__ void fetch(int pass, uint64_t address, int bytes) {
    ptx::load_global_16_if(word[pass], address, bytes > 0);
  }
  template <typename AddressOf>
  __device__ __forceinline__ void fetch_outside(AddressOf&&) {}
  __device__ __forceinline__ void read(uint32_t (&out)[4], int pass, uint64_t, int) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = word[pass][i];
  }
};

// ... and for rows of any alignment.
template <typename Element, int kPasses>
struct Chunks<Loader::kRealign, Element, kPasses> : mma_sync::RealignedChunks<Element, kPasses> {
  using mma_sync::RealignedChunks<Element, kPasses>::RealignedChunks;
};

template <typename Tile, Major kMajor, Loader kLoader>
struct OperandStream {
  using Element = typename Tile::Element;
  static constexpr int kPasses = Tile::kPasses;
  static constexpr bool kIsKMajor = kMajor == Major::kK;

  const Element* source;  // this thread's chunk of pass 0
  int64_t ld;
  int row, chunk;   // of the thread's chunk, in the tile
  uint32_t inside;  // bit `pass`: that pass's row is inside the operand
  int bytes;        // bytes of the chunk inside the operand, 0 to 16
  int length;       // elements of k in the k-tile
  Chunks<kLoader, Element, kPasses> chunks;

  // Streams the operand from `first_k` on, for the tile whose first row (A) or column (B) is
  // `first_mn`. The first k-tile has `length` elements of k.
  __device__ __forceinline__ OperandStream(const Operand& operand, const Element* matrix,
                                           int first_mn, int extent_mn, int first_k, int length)
      : ld(operand.ld),
        row(threadIdx.x / Tile::kChunks),
        chunk(threadIdx.x % Tile::kChunks),
        length(length),
        chunks(operand) {
    const int column = chunk * Tile::kChunkElements;
    int columns;
    int rows;
    if constexpr (kIsKMajor) {
      source = matrix + (first_mn + row) * ld + first_k + column;
      rows = extent_mn - first_mn;
      columns = length;
    } else {
      source = matrix + (first_k + row) * ld + first_mn + column;
      rows = length;
      columns = extent_mn - first_mn;
    }
    inside = 0;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      inside |= (row + pass * Tile::kRowStep < rows) << pass;
    }
    bytes = max(0, min(columns - column, Tile::kChunkElements)) * int(sizeof(Element));
  }

  __device__ __forceinline__ void fetch() {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) chunks.fetch(pass, address(pass), valid_bytes(pass));
  }

  __device__ __forceinline__ void store(uint32_t stage) {
    chunks.fetch_outside([&](int pass) { return address(pass); });
    const uint32_t offset0 = Tile::offset(row, chunk);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      uint32_t word[4];
      chunks.read(word, pass, address(pass), valid_bytes(pass));
      ptx::store_shared_16(stage + Tile::pass_offset(offset0, row, chunk, pass), word);
    }
    source += kIsKMajor ? length : length * ld;
    length = Tile::kExtentK;
    if constexpr (kIsKMajor) {
      bytes = 16;
    } else {
      inside = (1u << kPasses) - 1;
    }
  }

 private:
  __device__ __forceinline__ uint64_t address(int pass) const {
    return reinterpret_cast<uint64_t>(source + pass * (Tile::kRowStep * ld));
  }
  // Bytes of a pass's chunk inside the operand; the rest reads as zeros.
  __device__ __forceinline__ int valid_bytes(int pass) const {
    return inside >> pass & 1 ? bytes : 0;
  }
};

}  // namespace jax_tcgemm::sm75
