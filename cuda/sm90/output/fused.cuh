// Applies the epilogue between accumulators and output buffers, 16 columns of a warp's rows at a
// time. It is a loop around little code, because code that runs once a tile costs as much as
// fetching it.

#pragma once

#include <stdint.h>

#include "common/dtype.cuh"
#include "epilogue/accumulator_chunk.cuh"
#include "epilogue/activations.cuh"
#include "epilogue/formula.cuh"
#include "epilogue/vector_io.cuh"
#include "gemm_params.h"
#include "ptx/cluster.cuh"
#include "ptx/shared_memory.cuh"
#include "sm90/output/output_buffers.cuh"
#include "sm90/output/output_tile.h"
#include "sm90/output/subtile.cuh"
#include "sm90/ring.cuh"

namespace jax_tcgemm::sm90 {

// kGeneral: any epilogue. Otherwise D = f(alpha * acc + bias), gated or not. Each test in the loop
// costs as much as several values. The code that copies out a D which TMA cannot address is large;
// it exists only for the Finish to which host code sends such a D, not in every loop.
template <KernelConfig kConfig, bool kSwapAb, bool kGeneral>
struct FusedOutput {
  using Buffers = OutputBuffers<kConfig, kSwapAb>;
  using Element = typename AlgorithmTraits<kConfig.algorithm>::Output;
  using Sub = FusedSubtile<kConfig, Element, kSwapAb, !kGeneral>;
  using Accumulators = float[Buffers::kBlocks][kConfig.tile_n / 2];

  const GemmParams& params;
  Buffers& buffers;
  Sub sub;
  uint32_t bias;  // address in shared memory of the bias of the tile's first column

  // `tile` is the place of the warp's first rows.
  __device__ __forceinline__ void run(const Accumulators& acc, const OutputPlace& tile) const {
    const EpilogueParams& epilogue = params.epilogue;
    if constexpr (kConfig.gated) {
      visit_common_activation(epilogue, [&](const auto& functor) {
        run_chunks(acc, tile,
                   [&](Chunk& value, const Position& at) { gate(functor, value, acc, at); });
      });
    } else if constexpr (!kGeneral) {
      visit_common_activation(epilogue, [&](const auto& functor) {
        run_chunks(acc, tile,
                   [&](Chunk& value, const Position&) { apply_activation(functor, value); });
      });
    } else {
      const float beta = scalar_of(params, tile.batch, epilogue.beta);
      run_chunks(acc, tile, [&](Chunk& value, const Position& at) {
        finish_values(
            epilogue, beta, value,
            [&](Chunk& c) { load_c(c, epilogue.c, buffers.results - 1, at); },
            [&](Chunk& c2) { load_c(c2, epilogue.c2, 0, at); },
            [&](const Chunk& aux) { store(aux, 0, at); });
      });
    }
  }

 private:
  struct Position {
    int index;  // in the sub-tile
    int chunk;  // in its sub-tile
    OutputPlace place;
    int tile_column;
  };

  template <typename Finish>
  __device__ __forceinline__ void run_chunks(const Accumulators& acc, const OutputPlace& tile,
                                             Finish&& finish) const {
    const float alpha = scalar_of(params, tile.batch, params.epilogue.alpha);
#pragma unroll 1
    for (int index = 0; index < Buffers::kChunks; ++index) {
      const OutputPlace place = Buffers::place_of(tile, index);
      const Position at = {index, index & (sub.chunks() - 1), place, place.column - tile.column};
      Chunk value;
      take<0>(value, acc, at, alpha, params.epilogue.bias);
      if constexpr (kGeneral) {
        if (at.chunk == 0 && buffers.maps.c_by_tma) buffers.template wait_for_c<Sub>(place);
      }
      finish(value, at);
      store(value, kGeneral ? buffers.results - 1 : 0, at);
      if (at.chunk < sub.chunks() - 1) continue;
      buffers.template send<kGeneral>(sub, Buffers::place_of(tile, index - at.chunk));
      if constexpr (kGeneral) {
        if (buffers.maps.c_by_tma) buffers.prefetch_next_c(sub, tile, index + 1);
      }
    }
  }

  __device__ __forceinline__ uint32_t address(int result) const {
    return buffers.template address<Sub>(buffers.set, result);
  }
  __device__ __forceinline__ void store(const Chunk& value, int result, const Position& at) const {
    sub.store(value, address(result), at.chunk);
  }

  // value: g -> f(g) * u. g and u are further results if the epilogue has any.
  template <typename Functor>
  __device__ __forceinline__ void gate(const Functor& functor, Chunk& value,
                                       const Accumulators& acc, const Position& at) const {
    Chunk up;
    take<Buffers::kBlockChunks>(up, acc, at, 1.f, params.epilogue.bias2);
    if constexpr (kGeneral) {
      if (params.epilogue.aux != nullptr) {
        store(value, 0, at);
        store(up, 1, at);
      }
    }
    apply_activation(functor, value);
#pragma unroll
    for (int i = 0; i < kChunkValues; ++i) value[i] *= up[i];
  }

  // Calls visit(i, m, n) for each value of the thread. Accumulator rows are rows of D, or columns
  // of D if swapped.
  template <typename Visitor>
  static __device__ __forceinline__ void visit_places(const OutputPlace& at, Visitor&& visit) {
    const int row = at.row + Buffers::lane() / 4;
    const int column = at.column + Buffers::lane() % 4 * 2;
#pragma unroll
    for (int i = 0; i < kChunkValues; ++i) {
      const int m = row + i / 2 % 2 * 8;
      const int n = column + i % 2 + i / 4 * 8;
      kSwapAb ? visit(i, n, m) : visit(i, m, n);
    }
  }

  __device__ __forceinline__ void load_c(Chunk& value, const Addend& source, int result,
                                         const Position& at) const {
    if (buffers.maps.c_by_tma) return sub.load(value, address(result), at.chunk);
    const int64_t batch = batch_offset(params, at.place.batch, source.batch);
    if (source.stride_n == 1 && (source.type == ElementType::kF32) == (sizeof(Element) == 4)) {
      return load_rows(value, static_cast<const Element*>(source.data) + batch, source.stride_m,
                       at.place);
    }
    visit_places(at.place, [&](int i, int m, int n) {
      const bool inside = m < params.m && n < params.n;
      value[i] =
          inside ? load<Element>(source, batch + m * source.stride_m + n * source.stride_n) : 0.f;
    });
  }

  // Loads from contiguous rows in the operands' type. Beyond the edges it loads some elements
  // twice: behind branches, each load would wait for the one before.
  __device__ __forceinline__ void load_rows(Chunk& value, const Element* from, int64_t stride,
                                            const OutputPlace& place) const {
    visit_places(place, [&](int i, int m, int n) {
      value[i] = float(from[min(m, params.m - 1) * stride + min(n, params.n - 1)]);
    });
  }

  // value = alpha * scales * accumulators + bias, for the accumulators from column kFirst * 16 of
  // the tile on.
  template <int kFirst>
  __device__ __forceinline__ void take(Chunk& value, const Accumulators& acc, const Position& at,
                                       float alpha, const Addend& source) const {
    float of[4] = {};  // columns 0, 1, 8, 9 of the thread; swapped: rows 0, 8
    read_bias(of, source, at.place, kFirst * kChunkColumns + at.tile_column);
    const auto bias_of = [&](int i) { return of[kSwapAb ? i / 2 % 2 : i / 4 * 2 + i % 2]; };
    const bool scales = kGeneral && !kConfig.gated;
    visit_chunk<kFirst, Buffers::kBlockChunks>(acc, at.index, [&](int i, float a) {
      ptx::multiply_add(value[i], alpha, a, scales ? 0.f : bias_of(i));
    });
    if (!scales) return;
    scale(value, at.place);
#pragma unroll
    for (int i = 0; i < kChunkValues; ++i) value[i] += bias_of(i);
  }

  // value *= row_scale * column_scale
  __device__ __forceinline__ void scale(Chunk& value, const OutputPlace& at) const {
    const Addend& of_rows = params.epilogue.row_scale;
    const Addend& of_columns = params.epilogue.column_scale;
    if (of_rows.data != nullptr) {
      const int64_t batch = batch_offset(params, at.batch, of_rows.batch);
      visit_places(at, [&](int i, int m, int) {
        if (m < params.m) value[i] *= load<Element>(of_rows, batch + m * of_rows.stride_m);
      });
    }
    if (of_columns.data != nullptr) {
      const int64_t batch = batch_offset(params, at.batch, of_columns.batch);
      visit_places(at, [&](int i, int, int n) {
        if (n < params.n) value[i] *= load<Element>(of_columns, batch + n * of_columns.stride_n);
      });
    }
  }

  __device__ __forceinline__ void read_bias(float (&of)[4], const Addend& source,
                                            const OutputPlace& at, int tile_column) const {
    if (source.data == nullptr) return;
    if constexpr (kSwapAb) {
      const int64_t batch = batch_offset(params, at.batch, source.batch);
      const int column = at.row + Buffers::lane() / 4;
      if (column < params.n) of[0] = load<Element>(source, batch + column * source.stride_n);
      if (column + 8 < params.n)
        of[1] = load<Element>(source, batch + (column + 8) * source.stride_n);
    } else {
      const uint32_t from = bias + (tile_column + Buffers::lane() % 4 * 2) * 4;
      ptx::load_shared_8(of[0], of[1], from);
      ptx::load_shared_8(of[2], of[3], from + 8 * 4);
    }
  }
};

}  // namespace jax_tcgemm::sm90
