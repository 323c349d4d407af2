// The epilogues with little arithmetic: the rounded product, or the product with a bias, or with a
// bias and C. Their code is unrolled, so that accumulators need no moves. The code runs once a
// tile, so fetching its instructions dominates its time.

#pragma once

#include <stdint.h>

#include <type_traits>

#include "common/dtype.cuh"
#include "epilogue/formula.cuh"
#include "gemm_params.h"
#include "ptx/shared_memory.cuh"
#include "sm90/output/output_buffers.cuh"
#include "sm90/output/row.cuh"
#include "sm90/output/subtile.cuh"
#include "sm90/tensor_maps.h"

namespace jax_tcgemm::sm90 {

// kWide: D is float32.
template <KernelConfig kConfig, bool kSwapAb, bool kWide, Finish kFinish>
struct UnrolledOutput {
  using Buffers = OutputBuffers<kConfig, kSwapAb>;
  using Element = typename AlgorithmTraits<kConfig.algorithm>::Output;
  static constexpr bool kWithC = kFinish == Finish::kAddC;
  using Sub = OutputSubtile<kConfig, Element, kWide, kSwapAb, !kWithC>;
  static constexpr int kBlockValues = kConfig.tile_n / 2;
  using Accumulators = float[Buffers::kBlocks][kBlockValues];

  const GemmParams& params;
  Buffers& buffers;
  uint32_t bias;  // address in shared memory of the bias of the tile's first column

  // `tile` is the place of the warp's first rows.
  __device__ __forceinline__ void run(const Accumulators& acc, const OutputPlace& tile) const {
    if constexpr (kFinish == Finish::kRows) {
      run_rows(acc, tile);
    } else {
      run_subtiles(acc, tile);
    }
  }

 private:
  static constexpr int kBytes = kWide ? 4 : 2;  // of an element

  __device__ __forceinline__ void run_subtiles(const Accumulators& acc,
                                               const OutputPlace& tile) const {
    const float alpha = scalar_of(params, tile.batch, params.epilogue.alpha);
    const float beta = scalar_of(params, tile.batch, params.epilogue.beta);
#pragma unroll
    for (int index = 0; index < Buffers::kChunks; ++index) {
      const int chunk = index % Sub::kChunks;  // in the sub-tile
      const OutputPlace place = Buffers::place_of(tile, index - chunk);
      Chunk value;
      take(value, acc, index);
      const uint32_t buffer = buffers.template address<Sub>(buffers.set, 0);
      if constexpr (kFinish != Finish::kProduct) add_bias(value, alpha, index);
      if constexpr (kWithC) {
        if (chunk == 0) buffers.template wait_for_c<Sub>(place);
        add_c(beta, value, [&](Chunk& c) { Sub::load(c, buffer, chunk); });
      }
      Sub::store(value, buffer, chunk);
      if (chunk < Sub::kChunks - 1) continue;
      buffers.template send<false>(Sub(), place);
      if constexpr (kWithC) buffers.prefetch_next_c(Sub(), tile, index + 1);
    }
  }

  // Stores D without C if TMA cannot address D, in parts of rows that the buffers hold.
  __device__ __forceinline__ void run_rows(const Accumulators& acc, const OutputPlace& tile) const {
    constexpr int kAll = Buffers::kBlockChunks;
    constexpr int kMost = Buffers::most_row_chunks(kBytes);
    constexpr int kParts = (kAll + kMost - 1) / kMost;
    constexpr int kPart = (kAll + kParts - 1) / kParts;
    constexpr int kLast = kAll - (kParts - 1) * kPart;
    const float alpha = scalar_of(params, tile.batch, params.epilogue.alpha);
#pragma unroll
    for (int block = 0; block < Buffers::kBlocks; ++block) {
#pragma unroll
      for (int part = 0; part < kParts - 1; ++part) {
        write_part<kPart>(acc, tile, alpha, block * kAll + part * kPart);
      }
      write_part<kLast>(acc, tile, alpha, (block + 1) * kAll - kLast);
    }
  }

  template <int kChunks>
  __device__ __forceinline__ void write_part(const Accumulators& acc, const OutputPlace& tile,
                                             float alpha, int first) const {
    using Value = std::conditional_t<kWide, float, uint16_t>;
    using Rows = RowOutput<Element, Value, kChunks * kChunkColumns * kBytes>;
    const auto rows = buffers.template rows<Rows>(Buffers::place_of(tile, first));
    const auto place = rows.place();
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      Chunk value;
      take(value, acc, first + i);
      add_bias(value, alpha, first + i);
      rows.store(place, value, i);
    }
    buffers.send_rows(rows);
  }

  static __device__ __forceinline__ void take(Chunk& value, const Accumulators& acc, int index) {
#pragma unroll
    for (int i = 0; i < kChunkValues; ++i) {
      const int flat = index * kChunkValues + i;
      value[i] = acc[flat / kBlockValues][flat % kBlockValues];
    }
  }

  // value = alpha * value + bias
  __device__ __forceinline__ void add_bias(Chunk& value, float alpha, int index) const {
    float of[4] = {};  // columns 0, 1, 8, 9 of the thread
    if (params.epilogue.bias.data != nullptr) {
      const int column = index % Buffers::kBlockChunks * kChunkColumns + Buffers::lane() % 4 * 2;
      ptx::load_shared_8(of[0], of[1], bias + column * 4);
      ptx::load_shared_8(of[2], of[3], bias + column * 4 + 32);
    }
#pragma unroll
    for (int i = 0; i < kChunkValues; ++i) value[i] = fmaf(alpha, value[i], of[i / 4 * 2 + i % 2]);
  }
};

}  // namespace jax_tcgemm::sm90
