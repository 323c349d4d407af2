// D = activation(alpha * acc + beta * C + bias), in float32 on the accumulator, rounded once.
//
// The contract between a mainloop and this epilogue is a vector: the float32 accumulators of kWidth
// neighbouring columns of a row. How they came about, and by which instruction, is not known here.

#pragma once

#include <stdint.h>

#include "epilogue/activations.cuh"
#include "epilogue/vector_io.cuh"
#include "gemm_params.h"
#include "scheduler/raster.cuh"

namespace jax_tcgemm {

__device__ __forceinline__ float scalar_of(const GemmParams& params, int batch,
                                           const Scalar& scalar) {
  return scalar.data ? scalar.data[batch_offset(params, batch, scalar.batch)] : scalar.value;
}

// One thread's part of the epilogue of a tile: vectors of the same columns.
template <typename Element, int kWidth>
struct FusedEpilogue {
  using Vector = jax_tcgemm::Vector<kWidth>;

  const EpilogueParams& params;
  int m;
  int columns;  // of kWidth that are inside D
  float alpha, beta;
  int64_t c_offset, d_offset;  // elements, of (0, column) of the batch
  int64_t d_stride;
  Vector bias;

  __device__ __forceinline__ FusedEpilogue(const GemmParams& problem, int batch, int column)
      : params(problem.epilogue), m(problem.m), columns(problem.n - column), d_stride(problem.n) {
    alpha = scalar_of(problem, batch, params.alpha);
    beta = scalar_of(problem, batch, params.beta);
    d_offset = int64_t{batch} * problem.m * problem.n + column;
    c_offset = batch_offset(problem, batch, params.c.batch) + column * params.c.stride_n;
    for (float& value : bias) value = 0.f;
    if (params.bias.data) {
      load_vector<Element, kWidth>(
          bias, params.bias,
          batch_offset(problem, batch, params.bias.batch) + column * params.bias.stride_n, columns);
    }
  }

  __device__ __forceinline__ void store(void* matrix, int row, const Vector& value) const {
    if (row >= m) return;
    store_vector<Element, kWidth>(matrix, params.d_is_float32, params.d_vectorizable,
                                  d_offset + row * d_stride, value, columns);
  }

  // Finishes the accumulators of rows `row`, `row + row_step`, ... and writes them; `value` is
  // clobbered. The loads of all rows are in flight together.
  template <int kCount>
  __device__ __forceinline__ void finish(Vector (&value)[kCount], int row, int row_step) const {
    Vector c[kCount];
    if (params.c.data) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int c_row = row + i * row_step;
        load_vector<Element, kWidth>(c[i], params.c, c_offset + c_row * params.c.stride_m,
                                     c_row < m ? columns : 0);
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        value[i][j] = fmaf(alpha, value[i][j], bias[j]);
        if (params.c.data) value[i][j] = fmaf(beta, c[i][j], value[i][j]);
      }
      if (params.aux) store(params.aux, row + i * row_step, value[i]);
    }
    visit_activation(params.activation, [&]<ActivationFunctor Functor>(Functor) {
#pragma unroll
      for (Vector& vector : value) apply_activation<Functor>(vector);
    });
#pragma unroll
    for (int i = 0; i < kCount; ++i) store(params.d, row + i * row_step, value[i]);
  }
};

}  // namespace jax_tcgemm
