// A run-time compiled program's view of neighbouring columns in one row of D: it reads operands
// from global memory and writes results there.

#pragma once

#include <stdint.h>

#include <type_traits>

#include "compiled_params.h"
#include "epilogue/compiled_functions.cuh"
#include "epilogue/compiled_rounding.cuh"
#include "epilogue/compiled_values.cuh"

namespace jax_tcgemm {

// Base of the view `Io`, which has
//   kBeginsInside: the first column is inside of D;
//   operand<kIndex>(): the address of an operand's matrix;
//   result_row(): the row among those of all matrices.
// A Program is as in epilogue/compiled_output.cuh.
template <typename Io, typename Program, int kCount>
struct CompiledRowIo {
  static constexpr int kValues = kCount;
  const CompiledParams& params;
  const int32_t& extent;  // columns of D
  int row;
  int column;  // the first

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
    T* const to = static_cast<T*>(params.results[kIndex]) + io().result_row() * extent + column;
    alignas(16) ElementPair<T> pairs[kValues / 2];
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) pairs[i] = pair_of<T>(value[2 * i], value[2 * i + 1]);
    if constexpr (Program::kResult[kIndex].by_vectors) {
#pragma unroll
      for (int i = 0; i < kValues / kWidth<T>; ++i) {
        if (Io::kBeginsInside || n(i * kWidth<T>) < extent) {
          reinterpret_cast<Word<T>*>(to)[i] = reinterpret_cast<const Word<T>*>(pairs)[i];
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        if (n(i) < extent) to[i] = i % 2 == 0 ? pairs[i / 2].first : pairs[i / 2].second;
      }
    }
  }

 private:
  // The values that a thread reads or writes at once: all of them, in 16 bytes at most.
  template <typename T>
  using Word = std::conditional_t<kCount * sizeof(T) == 4, uint32_t,
                                  std::conditional_t<kCount * sizeof(T) == 8, uint2, uint4>>;
  template <typename T>
  static constexpr int kWidth = sizeof(Word<T>) / sizeof(T);

  __device__ __forceinline__ const Io& io() const { return static_cast<const Io&>(*this); }

  template <typename T, int kIndex>
  __device__ __forceinline__ const T* at(int m, int n) const {
    const CompiledOperand& operand = params.operands[kIndex];
    return static_cast<const T*>(io().template operand<kIndex>()) + m * operand.stride_m +
           n * operand.stride_n;
  }

  // Reads neighbouring columns. Outside of D it reads the last columns instead, which needs no
  // branch; these values are never stored.
  template <typename T, int kIndex>
  __device__ __forceinline__ MatrixValues<T> neighbours(int m) const {
    MatrixValues<T> values;
    if constexpr (Program::kOperand[kIndex].by_vectors) {
      Word<T> words[kValues / kWidth<T>];
#pragma unroll
      for (int i = 0; i < kValues / kWidth<T>; ++i) {
        const int first = n(i * kWidth<T>);
        const int inside = Io::kBeginsInside ? first : min(first, extent - kWidth<T>);
        words[i] = __ldg(reinterpret_cast<const Word<T>*>(at<T, kIndex>(m, inside)));
      }
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        values.value[i] = value_of(reinterpret_cast<const T*>(words)[i]);
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

}  // namespace jax_tcgemm
