// Applies a JAX function, compiled at run time (jax_tcgemm/epilogue), to whole matrices without a
// product: the gradient of an epilogue. Memory limits this pass, so it touches each matrix once, 16
// bytes at a time.
//
// Roles: block: kPassRows rows of kPassColumns columns of one matrix; a warp: every kPassWarps-th
//        of these rows; a thread: kValues neighbouring columns of a row, and their joined values.
// Barriers: two __syncthreads() for each reduction over rows, after the last row.
// Timeline: [load -> Program -> store, join] for two rows at a time -> join the warps' values.
//
// A Program is as in epilogue/compiled_output.cuh. It also has each_reduction(visitor), which calls
// visitor.reduction<element, number of the result, along, join>(neutral) for each reduction.

#pragma once

#include <stdint.h>

#include "compiled_params.h"
#include "epilogue/compiled_functions.cuh"
#include "epilogue/compiled_row_io.cuh"
#include "epilogue/compiled_values.cuh"
#include "scheduler/raster.cuh"

namespace jax_tcgemm {

// The interface between a Program and a row's 8 neighbouring values.
template <typename Program>
struct PassIo : CompiledRowIo<PassIo<Program>, Program, kPassValues> {
  using Base = CompiledRowIo<PassIo<Program>, Program, kPassValues>;
  using Base::kValues, Base::n, Base::params;
  static constexpr bool kBeginsInside = false;
  static constexpr int kTotals = Program::kReductions > 0 ? Program::kReductions : 1;
  static constexpr int kOperands = Program::kOperands > 0 ? Program::kOperands : 1;

  const void* (&matrices)[kOperands];  // each operand's matrix of the batch
  int batch;
  int column_block;
  uint32_t (&totals)[kTotals][kValues];  // bits of the values joined over rows

  template <int kIndex>
  __device__ __forceinline__ const void* operand() const {
    return matrices[kIndex];
  }
  __device__ __forceinline__ int64_t result_row() const {
    return int64_t{batch} * params.m + this->row;
  }

  // Joins the row's values for a reduction. Values outside the matrix count as `neutral`.
  template <typename T, int kIndex, Along kAlong, typename Join>
  __device__ __forceinline__ void reduce(ValueOf<T> (&value)[kValues], ValueOf<T> neutral) const {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (n(i) >= params.n) value[i] = neutral;
    }
    if constexpr (kAlong == Along::kRows) {
      auto x = value[0];
#pragma unroll
      for (int i = 1; i < kValues; ++i) x = Join::join(x, value[i]);
      x = joined_lanes<Join, 1, 16>(x);
      const int blocks = (params.n + kPassColumns - 1) / kPassColumns;
      if (threadIdx.x % 32 == 0) {
        static_cast<T*>(params.results[kIndex])[result_row() * blocks + column_block] =
            element_of<T>(x);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        uint32_t& total = totals[kIndex - Program::kResults][i];
        total = bits_as<uint32_t>(Join::join(bits_as<ValueOf<T>>(total), value[i]));
      }
    }
  }
};

template <typename Program>
class CompiledPass {
 public:
  static __device__ __forceinline__ void run(const CompiledParams& params) {
    const int column_blocks = (params.n + kPassColumns - 1) / kPassColumns;
    const int row_blocks = (params.m + kPassRows - 1) / kPassRows;
    const int blocks_before = blockIdx.x / column_blocks;
    const int column_block = blockIdx.x - blocks_before * column_blocks;
    const int batch = blocks_before / row_blocks;
    const int row_block = blocks_before - batch * row_blocks;

    const void* matrices[Io::kOperands];
    each<Program::kOperands>([&]<int kIndex>() {
      const CompiledOperand& operand = params.operands[kIndex];
      matrices[kIndex] = static_cast<const char*>(operand.data) +
                         batch_offset_if<Program::kBatched>(params, batch, operand.batch) *
                             Program::kOperand[kIndex].bytes;
    });
    uint32_t totals[Io::kTotals][kPassValues];
    Program::each_reduction(Beginning{totals});
    const int end = min((row_block + 1) * kPassRows, params.m);
    const int column =
        column_block * kPassColumns + static_cast<int>(threadIdx.x % 32) * kPassValues;
    const auto finish = [&](int row) {
      const Io io = {{params, params.n, row, column}, matrices, batch, column_block, totals};
      Program::run(io);
    };
    int row = row_block * kPassRows + static_cast<int>(threadIdx.x) / 32;
#pragma unroll 1
    for (; row + kPassWarps < end; row += 2 * kPassWarps) {
      finish(row);  // the loads of both rows are in flight together
      finish(row + kPassWarps);
    }
    if (row < end) finish(row);
    __shared__ Joined of_warps;
    Program::each_reduction(Ending{params, totals, of_warps,
                                   int64_t{batch} * row_blocks + row_block, column_block,
                                   column_blocks});
  }

 private:
  using Io = PassIo<Program>;
  using Totals = uint32_t[Io::kTotals][kPassValues];
  using Joined = uint32_t[kPassWarps][kPassColumns];

  struct Beginning {
    Totals& totals;

    template <typename T, int kIndex, Along, typename Join>
    __device__ __forceinline__ void reduction(ValueOf<T> neutral) const {
#pragma unroll
      for (int i = 0; i < kPassValues; ++i) {
        totals[kIndex - Program::kResults][i] = bits_as<uint32_t>(neutral);
      }
    }
  };

  // Joins the warps' totals, always in the same order.
  struct Ending {
    const CompiledParams& params;
    Totals& totals;
    Joined& of_warps;   // used for one reduction after the other
    int64_t row_block;  // among those of all matrices
    int column_block;
    int column_blocks;

    template <typename T, int kIndex, Along kAlong, typename Join>
    __device__ __forceinline__ void reduction(ValueOf<T>) const {
      if constexpr (kAlong != Along::kRows) {
        const auto& total = totals[kIndex - Program::kResults];
        uint4* const own = reinterpret_cast<uint4*>(of_warps[threadIdx.x / 32]);
        __syncthreads();
        own[threadIdx.x % 32 * 2] = {total[0], total[1], total[2], total[3]};
        own[threadIdx.x % 32 * 2 + 1] = {total[4], total[5], total[6], total[7]};
        __syncthreads();
        const auto of_warp = [&](int warp) {
          return bits_as<ValueOf<T>>(of_warps[warp][threadIdx.x]);
        };
        auto x = of_warp(0);
#pragma unroll
        for (int warp = 1; warp < kPassWarps; ++warp) x = Join::join(x, of_warp(warp));
        T* const out = static_cast<T*>(params.results[kIndex]);
        if constexpr (kAlong == Along::kColumns) {
          const int column = column_block * kPassColumns + static_cast<int>(threadIdx.x);
          if (column < params.n) out[row_block * params.n + column] = element_of<T>(x);
        } else {
          x = joined_block<Join>(x, of_warps[0]);
          if (threadIdx.x == 0) out[row_block * column_blocks + column_block] = element_of<T>(x);
        }
      }
    }

    // Joins the values of all threads. `shared` has room for one value for each warp.
    template <typename Join, typename Value>
    static __device__ __forceinline__ Value joined_block(Value x, uint32_t* shared) {
      x = joined_lanes<Join, 1, 16>(x);
      __syncthreads();
      if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = bits_as<uint32_t>(x);
      __syncthreads();
      x = bits_as<Value>(shared[0]);
#pragma unroll
      for (int warp = 1; warp < kPassWarps; ++warp) {
        x = Join::join(x, bits_as<Value>(shared[warp]));
      }
      return x;
    }
  };
};

}  // namespace jax_tcgemm
