// The view that a function compiled at run time (jax_tcgemm/epilogue) has of products with packed
// weights: neighbouring columns of one row of D.

#pragma once

#include <stdint.h>

#include "compiled_params.h"
#include "epilogue/compiled_functions.cuh"
#include "epilogue/compiled_rounding.cuh"
#include "epilogue/compiled_values.cuh"
#include "sm90/packed/output.cuh"

namespace jax_tcgemm::sm90 {

// The vectors that a thread reads and writes at once.
template <int kBytes>
struct PackedWord;
template <>
struct PackedWord<4> {
  using Type = uint32_t;
};
template <>
struct PackedWord<8> {
  using Type = uint2;
};
template <>
struct PackedWord<16> {
  using Type = uint4;
};

template <typename Program>
struct PackedIo {
  static constexpr int kValues = kPackedVector;
  const CompiledParams& params;
  int extent;  // columns of D
  int row;
  int column;             // the first; it is inside
  float acc[2][kValues];  // of each weight

  __device__ __forceinline__ int m(int) const { return row; }
  __device__ __forceinline__ int n(int i) const { return column + i; }

  template <typename T, int kIndex>
  __device__ __forceinline__ ScalarValues<T> scalar() const {
    return {value_of(load_global(at<T, kIndex>(0, 0)))};
  }
  template <typename T, int kIndex>
  __device__ __forceinline__ ScalarValues<T> rows() const {
    return {value_of(load_global(at<T, kIndex>(row, 0)))};
  }
  template <typename T, int kIndex>
  __device__ __forceinline__ MatrixValues<T> columns() const {
    return neighbours<T, kIndex>(0);
  }
  template <typename T, int kIndex>
  __device__ __forceinline__ MatrixValues<T> matrix() const {
    return neighbours<T, kIndex>(row);
  }

  template <typename T, int kIndex>
  __device__ __forceinline__ void write(const ValueOf<T> (&value)[kValues]) const {
    using Word = typename PackedWord<kValues * sizeof(T)>::Type;
    T* const to = static_cast<T*>(params.results[kIndex]) + int64_t{row} * extent + column;
    alignas(16) ElementPair<T> pairs[kValues / 2];
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) pairs[i] = pair_of<T>(value[2 * i], value[2 * i + 1]);
    if constexpr (Program::kResult[kIndex].by_vectors) {
      *reinterpret_cast<Word*>(to) = *reinterpret_cast<const Word*>(pairs);
    } else {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        if (n(i) < extent) to[i] = i % 2 == 0 ? pairs[i / 2].first : pairs[i / 2].second;
      }
    }
  }

 private:
  template <typename T, int kIndex>
  __device__ __forceinline__ const T* at(int m, int n) const {
    const CompiledOperand& operand = params.operands[kIndex];
    return static_cast<const T*>(operand.data) + m * operand.stride_m + n * operand.stride_n;
  }

  // Reads neighbouring columns. Outside of D it reads the last one; these values are never stored.
  template <typename T, int kIndex>
  __device__ __forceinline__ MatrixValues<T> neighbours(int m) const {
    MatrixValues<T> values;
    if constexpr (Program::kOperand[kIndex].by_vectors) {
      using Word = typename PackedWord<kValues * sizeof(T)>::Type;
      const Word word = __ldg(reinterpret_cast<const Word*>(at<T, kIndex>(m, column)));
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        values.value[i] = value_of(reinterpret_cast<const T*>(&word)[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        values.value[i] = value_of(load_global(at<T, kIndex>(m, min(n(i), extent - 1))));
      }
    }
    return values;
  }
};

}  // namespace jax_tcgemm::sm90
