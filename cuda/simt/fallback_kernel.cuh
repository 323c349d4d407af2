// The simt kernel for two weights, for groups whose sizes only the device knows, or for complex
// numbers. It serves GPUs that do not run the sm90 kernels, and operands that TMA cannot address. A
// program that was exported on a host without a GPU may meet such a GPU. The kernel must be correct
// and small, so each thread reads the layouts at run time and finds its group by itself.
//
// Roles: A thread computes one element of a tile of (tile_m, output_n) of D by float32 FMA over the
//        whole k or its group's k. Neighbouring threads compute neighbouring columns.
// Barriers: none.
// Timeline: [sizes, one after the other] -> loads of tile_k steps of k in flight together -> FMA
//        ... -> [the same for the second weight, or for the other parts] -> epilogue; then a tile
//        of the grid's next wave.

#pragma once

#include <stdint.h>

#include "common/ceil_div.h"
#include "common/dtype.cuh"
#include "epilogue/activations.cuh"
#include "epilogue/vector_io.cuh"
#include "gemm_params.h"
#include "kernel_config.h"
#include "scheduler/raster.cuh"
#include "simt/dot.cuh"
#include "simt/fallback_tiles.h"

namespace jax_tcgemm::simt {

// Returns the end of the group that begins at `begin`. Sizes count as in scheduler/ragged.cuh: a
// negative size counts as 0, and no group extends beyond `extent`.
__device__ __forceinline__ int group_end(const GemmParams& params, int group, int begin,
                                         int extent) {
  return begin + min(max(params.group_sizes[group], 0), extent - begin);
}

// Returns the group of a row, or the number of groups if the row belongs to no group.
__device__ __forceinline__ int group_of_row(const GemmParams& params, int row) {
  int group = 0;
#pragma unroll 1
  for (int end = 0; group < params.batch; ++group) {
    end = group_end(params, group, end, params.m);
    if (row < end) break;
  }
  return group;
}

struct Depth {
  int begin, end;

  __device__ __forceinline__ Depth(const GemmParams& params, int group) : begin(0), end(0) {
#pragma unroll 1
    for (int i = 0; i <= group; ++i) {
      begin = end;
      end = group_end(params, i, begin, params.k);
    }
  }
};

template <KernelConfig kConfig>
struct FallbackKernel {
  using Input = typename AlgorithmTraits<kConfig.algorithm>::Input;
  using Output = typename AlgorithmTraits<kConfig.algorithm>::Output;

  const GemmParams& params;
  const bool k_major_a, k_major_b;

  __device__ __forceinline__ void run() const {
    constexpr int kColumns = kConfig.output_n();
    const int64_t tiles = fallback_tiles(params, kConfig);
    const int64_t tiles_n = ceil_div(params.n, kColumns);
    const int64_t tiles_m = ceil_div(params.m, kConfig.tile_m);
#pragma unroll 1
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const int64_t strip = tile / tiles_n;
      const int matrix = static_cast<int>(strip / tiles_m);
      const int64_t row = (strip - matrix * tiles_m) * kConfig.tile_m + threadIdx.x / kColumns;
      const int64_t column = (tile - strip * tiles_n) * kColumns + threadIdx.x % kColumns;
      if (row < params.m && column < params.n) {
        compute(matrix, static_cast<int>(row), static_cast<int>(column));
      }
    }
  }

 private:
  __device__ __forceinline__ void compute(int matrix, int row, int column) const {
    const int64_t at = (int64_t{matrix} * params.m + row) * params.n + column;
    if constexpr (kConfig.grouped == Grouped::kK) {
      Line<Input> a(params, params.a, k_major_a, 0, row);
      Line<Input> b(params, params.b, k_major_b, 0, column);
      const Depth depth(params, matrix);
      a.data += depth.begin * a.stride;
      b.data += depth.begin * b.stride;
      store(params.epilogue.d, at, dot<kConfig.tile_k>(a, b, depth.end - depth.begin));
    } else {
      constexpr bool kRows = kConfig.grouped == Grouped::kM;
      const int batch = kRows ? group_of_row(params, row) : matrix;
      if (kRows && batch == params.batch) return clear(at);
      const Line<Input> a(params, params.a, k_major_a, batch, row);
      if constexpr (kConfig.pairs) {
        finish(dot_of_pairs(a, batch, column), 0.f, batch, column, at);
      } else {
        multiply(a, batch, column, at);
      }
    }
  }

  __device__ __forceinline__ void multiply(const Line<Input>& a, int batch, int column,
                                           int64_t at) const {
    Line<Input> b(params, params.b, k_major_b, batch, column);
    const float z = dot<kConfig.tile_k>(a, b, params.k);
    float up = 0.f;
    if constexpr (kConfig.gated) {
      // B2 has the layout of B.
      b.data = static_cast<const Input*>(params.b2) +
               (b.data - static_cast<const Input*>(params.b.data));
      up = dot<kConfig.tile_k>(a, b, params.k);
    }
    finish(z, up, batch, column, at);
  }

  // Returns one part of a complex dot product. The sum over A's real parts uses the column's own
  // part of B. The sum over A's imaginary parts uses the other part (GemmParams::pairs_of_b).
  __device__ __forceinline__ float dot_of_pairs(const Line<Input>& a, int batch, int column) const {
    const int part = column % 2;
    const Line<Input> numbers(params, params.b, k_major_b, batch,
                              k_major_b ? column / 2 : column - part);
    const int64_t step = k_major_b ? 2 : params.b.ld;
    float sum[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] = dot<kConfig.tile_k, Input>({a.data + i * a.stride, 2 * a.stride},
                                          {numbers.data + (part ^ i), step}, params.k / 2);
    }
    return part == 0 ? sum[0] - sum[1] : sum[0] + sum[1];
  }

  // Computes D = f(z + bias), multiplied by up + bias2 if gated. The argument of f and the factor
  // are further results, if there are any.
  __device__ __forceinline__ void finish(float z, float up, int batch, int column,
                                         int64_t at) const {
    const EpilogueParams& epilogue = params.epilogue;
    Vector<1> value = {z + bias_of(epilogue.bias, batch, column)};
    if (epilogue.aux != nullptr) store(epilogue.aux, at, value[0]);
    visit_activation(epilogue, [&]<ActivationFunctor Functor>(const Functor& functor) {
      apply_activation(functor, value);
    });
    if constexpr (kConfig.gated) {
      up += bias_of(epilogue.bias2, batch, column);
      if (epilogue.aux2 != nullptr) store(epilogue.aux2, at, up);
      value[0] *= up;
    }
    store(epilogue.d, at, value[0]);
  }

  __device__ __forceinline__ void clear(int64_t at) const {
    if (params.epilogue.aux != nullptr) store(params.epilogue.aux, at, 0.f);
    store(params.epilogue.d, at, 0.f);
  }

  __device__ __forceinline__ float bias_of(const Addend& bias, int batch, int column) const {
    if (bias.data == nullptr) return 0.f;
    Vector<1> value;
    load_vector<Output, 1>(value, bias,
                           batch_offset(params, batch, bias.batch) + column * bias.stride_n, 1);
    return value[0];
  }

  __device__ __forceinline__ void store(void* matrix, int64_t at, float value) const {
    store_vector<Output, 1>(matrix, params.epilogue.d_type, false, at, {value}, 1);
  }
};

template <typename Row>
__global__ void __launch_bounds__(Row::kConfig.threads())
    fallback_kernel(const __grid_constant__ GemmParams params, bool k_major_a, bool k_major_b) {
  FallbackKernel<Row::kConfig>{params, k_major_a, k_major_b}.run();
}

}  // namespace jax_tcgemm::simt
