// A run-time compiled program's view of a sub-tile: operands and results in shared memory,
// accumulators in registers. See sm90/output/compiled.cuh.

#pragma once

#include <stdint.h>

#include "compiled_params.h"
#include "epilogue/compiled_functions.cuh"
#include "epilogue/compiled_rounding.cuh"
#include "epilogue/compiled_values.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/wgmma.cuh"
#include "scheduler/raster.cuh"
#include "sm90/output/output_tile.h"
#include "sm90/output/subtile.cuh"

namespace jax_tcgemm::sm90 {

// Places of a sub-tile's operands and results in a warp's part of shared memory.
template <KernelConfig kConfig, typename Program>
struct CompiledPlan {
  static constexpr int kVector = 16;  // bytes
  static constexpr bool kBatched = Program::kBatched;
  static constexpr int kWarpBytes = kConfig.staging_bytes() / 4;
  using Sum = ptx::SumOf<kConfig.algorithm>;

  // Bytes from row to row. The threads of a warp meet different banks, or at most two conflict
  // where space is shortest.
  static constexpr int pitch(int bytes, int columns) {
    return columns * bytes + (bytes == 4 && columns > 16 ? 2 * kVector : kVector);
  }
  static constexpr int operand_bytes(int i, int columns) {
    const CompiledOperandKind kind = Program::kOperand[i];
    if (!kind.is_staged()) return 0;
    return kind.along == Along::kMatrix ? kWarpRows * pitch(kind.bytes, columns)
                                        : columns * kind.bytes;
  }
  static constexpr int operands_bytes(int columns, int count = Program::kOperands) {
    int bytes = 0;
    for (int i = 0; i < count; ++i) bytes += operand_bytes(i, columns);
    return bytes;
  }
  static constexpr int results_bytes(int columns, int count = Program::kResults) {
    int bytes = 0;
    for (int i = 0; i < count; ++i) {
      bytes += kWarpRows * pitch(Program::kResult[i].bytes, columns);
    }
    return bytes;
  }
  static constexpr bool has_room(int columns, int stages) {
    return stages * operands_bytes(columns) + results_bytes(columns) <= kWarpBytes;
  }
  struct Choice {
    int columns;
    int stages;  // of operands; 0: the program reads them from global memory
  };
  // Long rows are quicker to store, and two stages hide the latency of operands from memory.
  static constexpr Choice choice() {
    if (kConfig.streams_b()) return {has_room(16, 0) ? 16 : 0, 0};
    constexpr Choice kChoices[] = {{64, 2}, {32, 2}, {16, 2}, {32, 1}, {16, 1}, {32, 0}, {16, 0}};
    for (const Choice& each : kChoices) {
      const bool divides = kConfig.output_n() % each.columns == 0;
      if (divides && has_room(each.columns, each.stages)) return each;
    }
    return {0, 0};
  }
  static constexpr int kColumns = choice().columns;
  static constexpr int kStages = choice().stages;
  static_assert(kColumns > 0, "no room for the results of so many types");

  // Constants, because device code cannot read the Program's arrays.
  static constexpr uint32_t kStageBytes = operands_bytes(kColumns);
  template <int kIndex>
  static constexpr uint32_t kOperandAt = operands_bytes(kColumns, kIndex);
  template <int kIndex>
  static constexpr uint32_t kResultAt = kStages * kStageBytes + results_bytes(kColumns, kIndex);
  template <int kIndex>
  static constexpr bool kIsStaged = kStages > 0 && Program::kOperand[kIndex].is_staged();
};

// A Program's view of 16 x 16 values of D. A thread has 8 of them, laid out like accumulators
// (Chunk).
template <typename Plan>
struct CompiledIo {
  static constexpr int kValues = kChunkValues;
  const CompiledParams& params;
  uint32_t operands;  // the stage's address in shared memory
  uint32_t results;
  int row;     // the thread's first row of D
  int column;  // the thread's first column of D
  int batch;
  int chunk_column;  // the thread's first column in the sub-tile
  typename Plan::Sum acc[2][kChunkValues];

  __device__ __forceinline__ int m(int i) const { return row + i / 2 % 2 * 8; }
  __device__ __forceinline__ int n(int i) const { return column + i % 2 + i / 4 * 8; }

  // Reads an operand that varies along no dimension.
  template <typename T, int kIndex>
  __device__ __forceinline__ ScalarValues<T> scalar() const {
    return {load<T, kIndex>(0, 0)};
  }
  template <typename T, int kIndex>
  __device__ __forceinline__ RowValues<T> rows() const {
    return {load<T, kIndex>(m(0), 0), load<T, kIndex>(m(2), 0)};
  }
  template <typename T, int kIndex>
  __device__ __forceinline__ ColumnValues<T> columns() const {
    ColumnValues<T> values;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if constexpr (Plan::template kIsStaged<kIndex>) {
        const uint32_t at = operands + Plan::template kOperandAt<kIndex> +
                            (chunk_column + 8 * j) * static_cast<uint32_t>(sizeof(T));
        load_shared_pair<T>(values.value[2 * j], values.value[2 * j + 1], at);
      } else {
        values.value[2 * j] = load<T, kIndex>(0, n(4 * j));
        values.value[2 * j + 1] = load<T, kIndex>(0, n(4 * j + 1));
      }
    }
    return values;
  }
  template <typename T, int kIndex>
  __device__ __forceinline__ MatrixValues<T> matrix() const {
    MatrixValues<T> values;
#pragma unroll
    for (int i = 0; i < kChunkValues; i += 2) {
      if constexpr (Plan::template kIsStaged<kIndex>) {
        const uint32_t at = operands + Plan::template kOperandAt<kIndex> + in_buffer<T>(i);
        load_shared_pair<T>(values.value[i], values.value[i + 1], at);
      } else {
        values.value[i] = load<T, kIndex>(m(i), n(i));
        values.value[i + 1] = load<T, kIndex>(m(i), n(i + 1));
      }
    }
    return values;
  }

  template <typename T, int kIndex>
  __device__ __forceinline__ void write(const ValueOf<T> (&value)[kChunkValues]) const {
#pragma unroll
    for (int i = 0; i < kChunkValues; i += 2) {
      store_shared_pair<T>(results + Plan::template kResultAt<kIndex> + in_buffer<T>(i), value[i],
                           value[i + 1]);
    }
  }

  // Reduces the values of each 16 x 16 block over rows and columns (Along::kNothing), over rows
  // (kColumns) or over columns (kRows). Values outside of D count as `neutral`. XLA reduces the
  // blocks' results, so the order of the reduction does not depend on the tile.
  template <typename T, int kIndex, Along kAlong, typename Join>
  __device__ __forceinline__ void reduce(ValueOf<T> (&value)[kChunkValues],
                                         ValueOf<T> neutral) const {
#pragma unroll
    for (int i = 0; i < kChunkValues; ++i) {
      if (m(i) >= params.m || n(i) >= params.n) value[i] = neutral;
    }
    static_assert(kReducedBlock == kChunkColumns);
    T* const out = static_cast<T*>(params.results[kIndex]);
    const uint32_t lane = ptx::volatile_lane();
    const int64_t row_blocks = (params.m + kChunkColumns - 1) / kChunkColumns;
    const int64_t column_blocks = (params.n + kChunkColumns - 1) / kChunkColumns;
    const int64_t row_block = batch * row_blocks + row / kChunkColumns;
    const int column_block = column / kChunkColumns;
    const auto join = [](auto x, auto y) { return Join::join(x, y); };
    if constexpr (kAlong == Along::kColumns) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {  // columns 0, 1, 8, 9 of the thread
        const int i = j / 2 * 4 + j % 2;
        const auto x = joined_lanes<Join, 4, 16>(join(value[i], value[i + 2]));
        if (lane < 4 && row < params.m && n(i) < params.n) {
          out[row_block * params.n + n(i)] = element_of<T>(x);
        }
      }
    } else if constexpr (kAlong == Along::kRows) {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {  // rows 0 and 8
        const auto x = joined_lanes<Join, 1, 2>(
            join(join(value[i], value[i + 1]), join(value[i + 4], value[i + 5])));
        if (lane % 4 == 0 && m(i) < params.m && column < params.n) {
          out[(int64_t{batch} * params.m + m(i)) * column_blocks + column_block] = element_of<T>(x);
        }
      }
    } else {
      auto x = value[0];
#pragma unroll
      for (int i = 1; i < kChunkValues; ++i) x = join(x, value[i]);
      x = joined_lanes<Join, 1, 16>(x);
      if (lane == 0 && row < params.m && column < params.n) {
        out[row_block * column_blocks + column_block] = element_of<T>(x);
      }
    }
  }

 private:
  // Offset of the pair that begins with value i.
  template <typename T>
  __device__ __forceinline__ uint32_t in_buffer(int i) const {
    constexpr int kPitch = Plan::pitch(sizeof(T), Plan::kColumns);
    return (ptx::volatile_lane() / 4 + i / 2 % 2 * 8) * kPitch +
           (chunk_column + i / 4 * 8) * static_cast<uint32_t>(sizeof(T));
  }

  // Loads an operand's element. Outside of D it loads the last row or column instead, which takes
  // no branch; such values are never stored.
  template <typename T, int kIndex>
  __device__ __forceinline__ ValueOf<T> load(int m, int n) const {
    const CompiledOperand& operand = params.operands[kIndex];
    const int64_t at = batch_offset_if<Plan::kBatched>(params, batch, operand.batch) +
                       min(m, params.m - 1) * operand.stride_m +
                       min(n, params.n - 1) * operand.stride_n;
    return value_of(load_global(static_cast<const T*>(operand.data) + at));
  }
};

}  // namespace jax_tcgemm::sm90
