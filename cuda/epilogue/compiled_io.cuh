// A run-time compiled program's view of a sub-tile: operands and results in shared memory,
// accumulators in registers. See epilogue/compiled_output.cuh.

#pragma once

#include <stdint.h>

#include <type_traits>

#include "common/dtype.cuh"
#include "compiled_params.h"
#include "epilogue/accumulator_chunk.cuh"
#include "epilogue/compiled_functions.cuh"
#include "epilogue/compiled_rounding.cuh"
#include "epilogue/compiled_values.cuh"
#include "kernel_config.h"
#include "ptx/cluster.cuh"
#include "ptx/global_memory.cuh"
#include "ptx/shared_memory.cuh"
#include "scheduler/raster.cuh"

namespace jax_tcgemm {

// Places of a sub-tile's operands and results in a warp's part of shared memory. A sub-tile has
// kRows x kColumns values of D. kSwapAb: rows of the accumulators are columns of D.
template <KernelConfig kConfig, typename Function, bool kSwap = false>
struct CompiledPlan {
  using Program = Function;
  static constexpr int kVector = 16;  // bytes
  static constexpr bool kSwapAb = kSwap;
  static constexpr bool kIsDirect = false;
  static constexpr bool kBatched = Program::kBatched;
  static constexpr int kWarpBytes = kConfig.warp_buffer_bytes();
  // Columns of D in which a warp has accumulators of one product.
  static constexpr int kBlockColumns = kConfig.gated ? kConfig.output_n() : kConfig.warp_n();
  using Sum = SumOf<kConfig.algorithm>;

  // Bytes from row to row. The threads of a warp meet different banks, or at most two conflict
  // where space is shortest.
  static constexpr int pitch(int bytes, int columns) {
    return columns * bytes + (bytes == 4 && columns > 16 ? 2 * kVector : kVector);
  }
  // The sub-tile of `length` columns of accumulators. A warp has 16 rows of them.
  static constexpr int rows(int length) { return kSwapAb ? length : kChunkRows; }
  static constexpr int columns(int length) { return kSwapAb ? kChunkRows : length; }
  static constexpr int operand_bytes(int i, int length) {
    const CompiledOperandKind kind = Program::kOperand[i];
    if (!kind.is_staged()) return 0;
    return kind.along == Along::kMatrix ? rows(length) * pitch(kind.bytes, columns(length))
                                        : columns(length) * kind.bytes;
  }
  static constexpr int operands_bytes(int length, int count = Program::kOperands) {
    int bytes = 0;
    for (int i = 0; i < count; ++i) bytes += operand_bytes(i, length);
    return bytes;
  }
  static constexpr int results_bytes(int length, int count = Program::kResults) {
    int bytes = 0;
    for (int i = 0; i < count; ++i) {
      bytes += rows(length) * pitch(Program::kResult[i].bytes, columns(length));
    }
    return bytes;
  }
  static constexpr bool has_room(int length, int stages) {
    return stages * operands_bytes(length) + results_bytes(length) <= kWarpBytes;
  }
  struct Choice {
    int length;
    int stages;  // of operands; 0: the program reads them from global memory
  };
  // Long rows are quicker to store, and two stages hide the latency of operands from memory.
  static constexpr Choice choice() {
    if (kConfig.streams_b()) return {has_room(16, 0) ? 16 : 0, 0};
    constexpr Choice kChoices[] = {{64, 2}, {32, 2}, {16, 2}, {32, 1}, {16, 1}, {32, 0}, {16, 0}};
    for (const Choice& each : kChoices) {
      const bool divides = kBlockColumns % each.length == 0;
      const int stages = kConfig.stages_operands() ? each.stages : 0;
      if (divides && has_room(each.length, stages)) return {each.length, stages};
    }
    return {0, 0};
  }
  static constexpr int kLength = choice().length;
  static constexpr int kStages = choice().stages;
  static_assert(kLength > 0, "no room for the results of so many types");
  static constexpr int kRows = rows(kLength);
  static constexpr int kColumns = columns(kLength);

  // Constants, because device code cannot read the Program's arrays.
  static constexpr uint32_t kStageBytes = operands_bytes(kLength);
  template <int kIndex>
  static constexpr uint32_t kOperandAt = operands_bytes(kLength, kIndex);
  template <int kIndex>
  static constexpr uint32_t kResultAt = kStages * kStageBytes + results_bytes(kLength, kIndex);
  template <int kIndex>
  static constexpr bool kIsStaged = kStages > 0 && Program::kOperand[kIndex].is_staged();
};

// The plan of a kernel without buffers: operands and results are in global memory alone.
template <KernelConfig kConfig, typename Function>
struct DirectPlan {
  using Program = Function;
  using Sum = SumOf<kConfig.algorithm>;
  static constexpr bool kSwapAb = false;
  static constexpr bool kIsDirect = true;
  static constexpr bool kBatched = Program::kBatched;
  template <int kIndex>
  static constexpr bool kIsStaged = false;
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
  int chunk_column;  // the thread's first column of accumulators in the sub-tile
  typename Plan::Sum acc[2][kChunkValues];

  static constexpr bool kSwapAb = Plan::kSwapAb;
  // Values of operands that vary along the rows or the columns of D.
  template <typename T>
  using OfRows = std::conditional_t<kSwapAb, ColumnValues<T>, RowValues<T>>;
  template <typename T>
  using OfColumns = std::conditional_t<kSwapAb, RowValues<T>, ColumnValues<T>>;

  __device__ __forceinline__ int m(int i) const { return row + (kSwapAb ? second(i) : first(i)); }
  __device__ __forceinline__ int n(int i) const {
    return column + (kSwapAb ? first(i) : second(i));
  }

  // Reads an operand that varies along no dimension.
  template <typename T, int kIndex>
  __device__ __forceinline__ ScalarValues<T> scalar() const {
    return {load<T, kIndex>(batch_begin<kIndex>(), 0, 0)};
  }
  template <typename T, int kIndex>
  __device__ __forceinline__ OfRows<T> rows() const {
    const int64_t begin = batch_begin<kIndex>();
    OfRows<T> values;
#pragma unroll
    for (int i = 0; i < kChunkValues; ++i) {
      if (is_own<kSwapAb>(i)) values[i] = load<T, kIndex>(begin, m(i), 0);
    }
    return values;
  }
  template <typename T, int kIndex>
  __device__ __forceinline__ OfColumns<T> columns() const {
    const int64_t begin = batch_begin<kIndex>();
    OfColumns<T> values;
#pragma unroll
    for (int i = 0; i < kChunkValues; i += 2) {
      if (!is_own<!kSwapAb>(i)) continue;
      if constexpr (!Plan::template kIsStaged<kIndex>) {
        values[i] = load<T, kIndex>(begin, 0, n(i));
        if constexpr (!kSwapAb) values[i + 1] = load<T, kIndex>(begin, 0, n(i + 1));
      } else if constexpr (kSwapAb) {
        values[i] = load_shared_value<T>(staged<kIndex>() + in_row<T>(i));
      } else {
        load_shared_pair<T>(values[i], values[i + 1], staged<kIndex>() + in_row<T>(i));
      }
    }
    return values;
  }
  template <typename T, int kIndex>
  __device__ __forceinline__ MatrixValues<T> matrix() const {
    const int64_t begin = batch_begin<kIndex>();
    MatrixValues<T> values;
#pragma unroll
    for (int i = 0; i < kChunkValues; i += 2) {
      if constexpr (!Plan::template kIsStaged<kIndex>) {
        values[i] = load<T, kIndex>(begin, m(i), n(i));
        values[i + 1] = load<T, kIndex>(begin, m(i + 1), n(i + 1));
      } else if constexpr (kSwapAb) {
        values[i] = load_shared_value<T>(staged<kIndex>() + in_buffer<T>(i));
        values[i + 1] = load_shared_value<T>(staged<kIndex>() + in_buffer<T>(i + 1));
      } else {
        load_shared_pair<T>(values[i], values[i + 1], staged<kIndex>() + in_buffer<T>(i));
      }
    }
    return values;
  }

  template <typename T, int kIndex>
  __device__ __forceinline__ void write(const ValueOf<T> (&value)[kChunkValues]) const {
#pragma unroll
    for (int i = 0; i < kChunkValues; i += 2) {
      if constexpr (Plan::kIsDirect) {
        store_global_pair<T, kIndex>(m(i), n(i), value[i], value[i + 1]);
      } else {
        const uint32_t buffer = results + Plan::template kResultAt<kIndex>;
        if constexpr (kSwapAb) {
          store_shared_value<T>(buffer + in_buffer<T>(i), value[i]);
          store_shared_value<T>(buffer + in_buffer<T>(i + 1), value[i + 1]);
        } else {
          store_shared_pair<T>(buffer + in_buffer<T>(i), value[i], value[i + 1]);
        }
      }
    }
  }

  // Reduces the values of each 16 x 16 block over rows and columns (Along::kNothing), over rows
  // (kColumns) or over columns (kRows). Values outside of D count as `neutral`. XLA reduces the
  // blocks' results, so the order of the reduction does not depend on the tile. Nor does it depend
  // on kSwapAb: values are joined in the same pairs.
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
    const auto put_column = [&](int i, auto x) {
      if (row < params.m && n(i) < params.n) out[row_block * params.n + n(i)] = element_of<T>(x);
    };
    const auto put_row = [&](int i, auto x) {
      if (m(i) >= params.m || column >= params.n) return;
      out[(int64_t{batch} * params.m + m(i)) * column_blocks + column_block] = element_of<T>(x);
    };
    const auto& v = value;
    if constexpr (kAlong == Along::kColumns && kSwapAb) {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const auto x =
            joined_lanes<Join, 1, 2>(join(join(v[i], v[i + 4]), join(v[i + 1], v[i + 5])));
        if (lane % 4 == 0) put_column(i, x);
      }
    } else if constexpr (kAlong == Along::kColumns) {
#pragma unroll
      for (int i = 0; i < 6; i += i % 2 * 2 + 1) {  // 0, 1, 4, 5
        const auto x = joined_lanes<Join, 4, 16>(join(v[i], v[i + 2]));
        if (lane < 4) put_column(i, x);
      }
    } else if constexpr (kAlong == Along::kRows && kSwapAb) {
#pragma unroll
      for (int i = 0; i < 6; i += i % 2 * 2 + 1) {
        const auto x = joined_lanes<Join, 8, 16>(
            join(joined_lanes<Join, 4, 4>(v[i]), joined_lanes<Join, 4, 4>(v[i + 2])));
        if (lane < 4) put_row(i, x);
      }
    } else if constexpr (kAlong == Along::kRows) {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const auto x =
            joined_lanes<Join, 1, 2>(join(join(v[i], v[i + 1]), join(v[i + 4], v[i + 5])));
        if (lane % 4 == 0) put_row(i, x);
      }
    } else {
      // The order: rows 8 apart; columns 1 and 8 apart; the other rows; the other columns.
      ValueOf<T> x;
      if constexpr (kSwapAb) {
        ValueOf<T> of_rows[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) of_rows[i] = joined_lanes<Join, 4, 4>(join(v[i], v[i + 4]));
        x = join(join(of_rows[0], of_rows[2]), join(of_rows[1], of_rows[3]));
        x = joined_lanes<Join, 8, 16>(joined_lanes<Join, 1, 2>(x));
      } else {
        x = join(join(join(v[0], v[2]), join(v[1], v[3])),
                 join(join(v[4], v[6]), join(v[5], v[7])));
        x = joined_lanes<Join, 1, 2>(joined_lanes<Join, 4, 16>(x));
      }
      if (lane == 0 && row < params.m && column < params.n) {
        out[row_block * column_blocks + column_block] = element_of<T>(x);
      }
    }
  }

 protected:
  // Row and column of value i in the thread's accumulators (Chunk).
  static constexpr int first(int i) { return i / 2 % 2 * 8; }
  static constexpr int second(int i) { return i % 2 + i / 4 * 8; }
  // Checks if value i is the first one in its row of accumulators, or in its column.
  template <bool kOfColumns>
  static constexpr bool is_own(int i) {
    return kOfColumns ? first(i) == 0 : second(i) == 0;
  }

  // Returns the address of an operand in shared memory.
  template <int kIndex>
  __device__ __forceinline__ uint32_t staged() const {
    return operands + Plan::template kOperandAt<kIndex>;
  }

  // Writes a result's values in two neighbouring columns, if they are inside of D.
  template <typename T, int kIndex>
  __device__ __forceinline__ void store_global_pair(int m, int n, ValueOf<T> first,
                                                    ValueOf<T> second) const {
    if (m >= params.m || n >= params.n) return;
    T* const to =
        static_cast<T*>(params.results[kIndex]) + (int64_t{batch} * params.m + m) * params.n + n;
    const ElementPair<T> pair = pair_of<T>(first, second);
    if constexpr (Plan::Program::kResult[kIndex].by_vectors) {
      *reinterpret_cast<ElementPair<T>*>(to) = pair;
    } else {
      to[0] = pair.first;
      if (n + 1 < params.n) to[1] = pair.second;
    }
  }

  // Offset of value i in a row of the sub-tile.
  template <typename T>
  __device__ __forceinline__ uint32_t in_row(int i) const {
    const int at =
        kSwapAb ? static_cast<int>(ptx::volatile_lane()) / 4 + first(i) : chunk_column + second(i);
    return at * static_cast<uint32_t>(sizeof(T));
  }
  // Offset of value i in the sub-tile.
  template <typename T>
  __device__ __forceinline__ uint32_t in_buffer(int i) const {
    constexpr int kPitch = Plan::pitch(sizeof(T), Plan::kColumns);
    const int at =
        kSwapAb ? chunk_column + second(i) : static_cast<int>(ptx::volatile_lane()) / 4 + first(i);
    return at * kPitch + in_row<T>(i);
  }

  // Returns the offset of the values' batch in an operand. It takes 130 instructions in a kernel
  // with a batch, so it is computed once for each operand, not for each element.
  template <int kIndex>
  __device__ __forceinline__ int64_t batch_begin() const {
    return batch_offset_if<Plan::kBatched>(params, batch, params.operands[kIndex].batch);
  }

  // Loads an operand's element; `begin` is batch_begin. Outside of D it loads the last row or
  // column instead, which takes no branch; such values are never stored.
  template <typename T, int kIndex>
  __device__ __forceinline__ ValueOf<T> load(int64_t begin, int m, int n) const {
    const CompiledOperand& operand = params.operands[kIndex];
    const int64_t at =
        begin + min(m, params.m - 1) * operand.stride_m + min(n, params.n - 1) * operand.stride_n;
    return value_of(load_global(static_cast<const T*>(operand.data) + at));
  }
};

}  // namespace jax_tcgemm
