// The epilogue on accumulators of neighbouring columns. It reads and writes global memory.
//
// The interface between a mainloop and this epilogue is a vector: the float32 accumulators of
// kWidth neighbouring columns of a row. The epilogue does not depend on the instruction that
// computed them.

#pragma once

#include <stdint.h>

#include "epilogue/formula.cuh"
#include "epilogue/vector_io.cuh"
#include "gemm_params.h"
#include "kernel_config.h"
#include "scheduler/raster.cuh"

namespace jax_tcgemm {

// One thread's part of the epilogue of a tile: vectors of the same columns. kWork: the epilogues
// that it has code for, kSum or kAny.
template <typename Element, int kWidth, EpilogueWork kWork = EpilogueWork::kAny>
struct FusedEpilogue {
  static_assert(kWork >= EpilogueWork::kSum);

  using Vector = jax_tcgemm::Vector<kWidth>;

  const GemmParams& problem;
  const EpilogueParams& params;
  int batch;
  int columns;  // columns from the first one on that are inside D
  float alpha, beta;
  int64_t c_offset, d_offset;  // in elements, of (0, column) in the batch's matrix
  Vector bias, column_factor;  // column_factor includes alpha

  __device__ __forceinline__ FusedEpilogue(const GemmParams& problem, int batch, int column)
      : problem(problem),
        params(problem.epilogue),
        batch(batch),
        columns(problem.n - column),
        alpha(scalar_of(problem, batch, params.alpha)),
        beta(scalar_of(problem, batch, params.beta)) {
    d_offset = int64_t{batch} * problem.m * problem.n + column;
    c_offset = batch_offset(problem, batch, params.c.batch) + column * params.c.stride_n;
    load_columns(bias, params.bias, column, 0.f);
    if constexpr (kWork == EpilogueWork::kAny) {
      load_columns(column_factor, params.column_scale, column, 1.f);
      for (float& value : column_factor) value *= alpha;
    } else {
      for (float& value : column_factor) value = alpha;
    }
  }

  // Finishes the accumulators of rows `row`, `row + row_step`, ... and writes them. Overwrites
  // `value`. The loads of all rows are in flight together.
  template <Derivatives kDerivatives = Derivatives::kBoth, int kCount>
  __device__ __forceinline__ void finish(Vector (&value)[kCount], int row, int row_step) const {
    using Flat = float[kCount * kWidth];
    auto& flat = reinterpret_cast<Flat&>(value);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float factor = row_factor(row + i * row_step);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        value[i][j] = fmaf(factor * column_factor[j], value[i][j], bias[j]);
      }
    }
    const auto load = [&](const Addend& source, Flat& out) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int at = row + i * row_step;
        load_vector<Element, kWidth>(reinterpret_cast<Vector&>(out[i * kWidth]), source,
                                     c_offset + at * source.stride_m, at < problem.m ? columns : 0);
      }
    };
    const auto store = [&](void* matrix, const Flat& in) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int at = row + i * row_step;
        if (at >= problem.m) continue;
        store_vector<Element, kWidth>(matrix, known_d_type(params), params.d_vectorizable,
                                      d_offset + int64_t{at} * problem.n,
                                      reinterpret_cast<const Vector&>(in[i * kWidth]), columns);
      }
    };
    if constexpr (kWork == EpilogueWork::kAny) {
      finish_values<kDerivatives>(
          params, beta, flat, [&](Flat& c) { load(params.c, c); },
          [&](Flat& c2) { load(params.c2, c2); }, [&](const Flat& aux) { store(params.aux, aux); });
    } else if (params.c.data != nullptr) {
      add_c(beta, flat, [&](Flat& c) { load(params.c, c); });
    }
    store(params.d, flat);
  }

 private:
  __device__ __forceinline__ void load_columns(Vector& out, const Addend& source, int column,
                                               float absent) const {
    for (float& value : out) value = absent;
    if (source.data == nullptr) return;
    const int64_t at = batch_offset(problem, batch, source.batch) + column * source.stride_n;
    load_vector<Element, kWidth>(out, source, at, columns);
  }

  __device__ __forceinline__ float row_factor(int row) const {
    const Addend& source = params.row_scale;
    if (kWork < EpilogueWork::kAny || source.data == nullptr || row >= problem.m) return 1.f;
    return static_cast<const float*>(
        source.data)[batch_offset(problem, batch, source.batch) + row * source.stride_m];
  }
};

}  // namespace jax_tcgemm
