// The output of a kernel whose epilogue was compiled at run time from a function of JAX
// (jax_tcgemm/epilogue): any operands, any results. Takes the place of Output.
//
// A warp finishes its 16 rows sub-tile by sub-tile, of 16, 32 or 64 columns. What has whole vectors
// of columns is copied to the warp's part of shared memory one sub-tile ahead; results gather
// there, so that they leave as vectors as well. Warps do not wait for one another.
//
//   before the mainloop: cp.async of the first sub-tile's operands
//   the warp: [cp.async of the next one's] -> wait -> accumulators, operands -> Program ->
//             shared memory -> vectors of the results to memory
//
// A Program has kBlockScales (sm90/scaled_mainloop.cuh), kOperands, kOperand[], kResults, kResult[]
// (see compiled_params.h), and run(io), which makes 16 x 16 values of each result from an instance
// of CompiledIo.

#pragma once

#include <stdint.h>

#include "compiled_params.h"
#include "epilogue/compiled_values.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/wgmma.cuh"
#include "scheduler/raster.cuh"
#include "sm90/kernel.cuh"
#include "sm90/output/fused.cuh"
#include "sm90/output/output_tile.h"
#include "sm90/output/subtile.cuh"
#include "sm90/ring.cuh"

namespace jax_tcgemm::sm90 {

// Where the operands and results of a sub-tile lie in a warp's part of shared memory.
template <KernelConfig kConfig, typename Program>
struct CompiledPlan {
  static constexpr int kVector = 16;  // bytes
  static constexpr int kWarpBytes = kConfig.staging_bytes() / 4;
  using Sum = ptx::SumOf<kConfig.algorithm>;

  // Bytes from row to row: such that the threads of a warp meet different banks, or two at most
  // where there is least room.
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
    int stages;  // of operands; 0: they are read where they lie
  };
  // Long rows are quicker to store, and two stages hide that operands come from memory.
  static constexpr Choice choice() {
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

  // Constants, since device code cannot read the Program's arrays.
  static constexpr uint32_t kStageBytes = operands_bytes(kColumns);
  template <int kIndex>
  static constexpr uint32_t kOperandAt = operands_bytes(kColumns, kIndex);
  template <int kIndex>
  static constexpr uint32_t kResultAt = kStages * kStageBytes + results_bytes(kColumns, kIndex);
  template <int kIndex>
  static constexpr bool kIsStaged = kStages > 0 && Program::kOperand[kIndex].is_staged();
};

// What a Program sees of 16 x 16 values of D: a thread has 8, dealt as accumulators are (Chunk).
template <typename Plan>
struct CompiledIo {
  static constexpr int kValues = kChunkValues;
  const CompiledParams& params;
  uint32_t operands;  // in shared memory: the stage
  uint32_t results;
  int row;     // of D: the thread's first
  int column;  // likewise
  int batch;
  int chunk_column;  // the thread's first in the sub-tile
  typename Plan::Sum acc[2][kChunkValues];

  __device__ __forceinline__ int m(int i) const { return row + i / 2 % 2 * 8; }
  __device__ __forceinline__ int n(int i) const { return column + i % 2 + i / 4 * 8; }

  // What moves along nothing.
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

  // Joins the values over rows and columns (Along::kNothing), rows (kColumns) or columns (kRows) of
  // each 16 x 16; what lies outside of D counts as `neutral`. XLA joins the rest: an order of its
  // own, whatever the tile.
  template <typename T, int kIndex, Along kAlong, typename Join>
  __device__ __forceinline__ void reduce(ValueOf<T> (&value)[kChunkValues],
                                         ValueOf<T> neutral) const {
#pragma unroll
    for (int i = 0; i < kChunkValues; ++i) {
      if (m(i) >= params.m || n(i) >= params.n) value[i] = neutral;
    }
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
  // Of the pair that begins with value i.
  template <typename T>
  __device__ __forceinline__ uint32_t in_buffer(int i) const {
    constexpr int kPitch = Plan::pitch(sizeof(T), Plan::kColumns);
    return (ptx::volatile_lane() / 4 + i / 2 % 2 * 8) * kPitch +
           (chunk_column + i / 4 * 8) * static_cast<uint32_t>(sizeof(T));
  }

  // Of what lies outside of D the last row or column instead: no branch, and never stored.
  template <typename T, int kIndex>
  __device__ __forceinline__ ValueOf<T> load(int m, int n) const {
    const CompiledOperand& operand = params.operands[kIndex];
    const int64_t at = batch_offset(params, batch, operand.batch) +
                       min(m, params.m - 1) * operand.stride_m +
                       min(n, params.n - 1) * operand.stride_n;
    return value_of(load_global(static_cast<const T*>(operand.data) + at));
  }
};

template <KernelConfig kConfig, typename Program>
class CompiledOutput {
 public:
  using Plan = CompiledPlan<kConfig, Program>;
  static constexpr int kBlocks = kConfig.tile_m / (16 * kConfig.warps_m);
  using Accumulators = typename Plan::Sum[kBlocks][kConfig.tile_n / 2];

  __device__ __forceinline__ CompiledOutput(const CompiledParams& params, const TensorMaps&,
                                            const SharedMemory<kConfig>& smem, int /*warpgroup*/)
      : params_(params), buffers_(smem.output(__shfl_sync(0xffffffff, threadIdx.x / 32, 0))) {}

  // Before the mainloop of a tile.
  static __device__ __forceinline__ constexpr bool prepares(const TensorMaps&) {
    constexpr bool kAny = Plan::kStages > 0 && Plan::kStageBytes > 0;
    return kAny;
  }
  __device__ __forceinline__ void prepare(const OutputPlace& place) const {
    if constexpr (kStages > 0) copy_in(place_of(of_warp(place), 0), 0);
  }
  __device__ __forceinline__ void share_bias(const OutputPlace&) const {}

  // After it. acc is only read.
  __device__ __forceinline__ void finish(const Accumulators& acc, const OutputPlace& place) const {
    const OutputPlace tile = of_warp(place);
#pragma unroll 1
    for (int index = 0; index < kSubtiles; ++index) {
      const int stage = kStages == 2 ? index % 2 : 0;
      const bool is_last = index == kSubtiles - 1;
      if constexpr (kStages == 2) {
        if (!is_last) copy_in(place_of(tile, index + 1), stage ^ 1);
        if (is_last) ptx::cp_async_commit_group();  // of nothing, for the wait counts groups
        ptx::cp_async_wait_group<1>();
      } else if constexpr (kStages == 1) {
        ptx::cp_async_wait_group<0>();
      }
      __syncwarp();
      const OutputPlace at = place_of(tile, index);
      run_chunks(acc, index, at, stage);
      __syncwarp();
      if constexpr (kStages == 1) {
        if (!is_last) copy_in(place_of(tile, index + 1), 0);
      }
      each_result([&]<int kIndex>() { copy_out<kIndex>(at); });
      __syncwarp();
    }
  }

  // Before prepare: the rows of the tile's group.
  __device__ __forceinline__ void limit_rows(int end) { row_end_ = end; }

  // Instead of finish, where the group has no matrix: the product is zero.
  __device__ __forceinline__ void clear(const OutputPlace& place) const {
    const Accumulators zero = {};
    prepare(place);
    finish(zero, place);
  }

  __device__ __forceinline__ void drain() const {}

 private:
  static constexpr bool kGroups = kConfig.grouped == Grouped::kM;  // of rows, of one matrix

  static constexpr int kStages = Plan::kStages;
  static constexpr int kColumns = Plan::kColumns;
  static constexpr int kBlockSubtiles = kConfig.output_n() / kColumns;
  static constexpr int kSubtiles = kBlocks * kBlockSubtiles;
  static constexpr int kChunks = kColumns / kChunkColumns;  // of a sub-tile
  static constexpr int kBlockChunks = kConfig.output_n() / kChunkColumns;

  __device__ __forceinline__ OutputPlace of_warp(const OutputPlace& place) const {
    return {place.row + static_cast<int>(threadIdx.x / 32 % 4) * kWarpRows, place.column,
            place.batch};
  }
  // First row and column of a sub-tile.
  static __device__ __forceinline__ OutputPlace place_of(const OutputPlace& tile, int index) {
    const int block = index / kBlockSubtiles;
    return {tile.row + block * kBlockRows,
            tile.column + (index - block * kBlockSubtiles) * kColumns, tile.batch};
  }

  template <typename Visitor>
  static __device__ __forceinline__ void each_result(Visitor&& visit) {
    each<Program::kResults>(visit);
  }

  __device__ __forceinline__ void run_chunks(const Accumulators& acc, int index,
                                             const OutputPlace& at, int stage) const {
    const int lane = ptx::volatile_lane();
    const int lane_column = lane % 4 * 2;
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      CompiledIo<Plan> io = {params_,
                             buffers_ + stage * Plan::kStageBytes,
                             buffers_,
                             at.row + lane / 4,
                             at.column + chunk * kChunkColumns + lane_column,
                             at.batch,
                             chunk * kChunkColumns + lane_column,
                             {}};
      visit_chunk<0, kBlockChunks>(acc, index * kChunks + chunk,
                                   [&](int i, auto a) { io.acc[0][i] = a; });
      if constexpr (kConfig.gated) {
        visit_chunk<kBlockChunks, kBlockChunks>(acc, index * kChunks + chunk,
                                                [&](int i, auto a) { io.acc[1][i] = a; });
      }
      Program::run(io);
    }
  }

  // Sends for the operands of the sub-tile that begins there.
  __device__ __forceinline__ void copy_in(const OutputPlace& at, int stage) const {
    each<Program::kOperands>([&]<int kIndex>() {
      if constexpr (Plan::template kIsStaged<kIndex>) copy_operand<kIndex>(at, stage);
    });
    ptx::cp_async_commit_group();
  }

  template <int kIndex>
  __device__ __forceinline__ void copy_operand(const OutputPlace& at, int stage) const {
    constexpr CompiledOperandKind kKind = Program::kOperand[kIndex];
    constexpr int kRowVectors = kColumns * kKind.bytes / Plan::kVector;
    constexpr bool kMatrix = kKind.along == Along::kMatrix;
    constexpr int kVectors = kRowVectors * (kMatrix ? kWarpRows : 1);
    constexpr int kPitch = Plan::pitch(kKind.bytes, kColumns);
    const CompiledOperand& operand = params_.operands[kIndex];
    const char* const matrix = static_cast<const char*>(operand.data) +
                               batch_offset(params_, at.batch, operand.batch) * kKind.bytes;
    const uint32_t to = buffers_ + stage * Plan::kStageBytes + Plan::template kOperandAt<kIndex>;
#pragma unroll
    for (int i = 0; i < kVectors; i += 32) {
      const int vector = i + ptx::volatile_lane();
      const int row = kMatrix ? vector / kRowVectors : 0;
      const int column = vector % kRowVectors * (Plan::kVector / kKind.bytes);
      const bool exists = kVectors % 32 == 0 || vector < kVectors;
      const bool inside = at.column + column < params_.n && (!kMatrix || at.row + row < rows());
      if (!exists) continue;
      const int64_t from = (at.row + row) * operand.stride_m + (at.column + column);
      ptx::cp_async_16(to + row * kPitch + column * kKind.bytes,
                       matrix + (kMatrix ? from : at.column + column) * kKind.bytes, inside);
    }
  }

  template <int kIndex>
  __device__ __forceinline__ void copy_out(const OutputPlace& at) const {
    constexpr CompiledResultKind kKind = Program::kResult[kIndex];
    constexpr int kPitch = Plan::pitch(kKind.bytes, kColumns);
    // Elements that are written at once.
    constexpr int kWidth = kKind.by_vectors ? Plan::kVector / kKind.bytes : 1;
    constexpr int kRowVectors = kColumns / kWidth;
    const uint32_t from = buffers_ + Plan::template kResultAt<kIndex>;
    char* const matrix = static_cast<char*>(params_.results[kIndex]) +
                         int64_t{kGroups ? 0 : at.batch} * params_.m * params_.n * kKind.bytes;
    const auto copy = [&](int vector) {
      const int row = vector / kRowVectors;
      const int column = vector % kRowVectors * kWidth;
      if (at.row + row >= rows() || at.column + column >= params_.n) return;
      const int64_t to = (int64_t{at.row + row} * params_.n + at.column + column) * kKind.bytes;
      copy_shared_to_global<kWidth * kKind.bytes>(matrix + to,
                                                  from + row * kPitch + column * kKind.bytes);
    };
    constexpr int kCount = kWarpRows * kRowVectors;
    if constexpr (kCount % 32 == 0 && kKind.by_vectors) {
#pragma unroll
      for (int i = 0; i < kCount; i += 32) copy(i + ptx::volatile_lane());
    } else {
#pragma unroll 1
      for (int i = ptx::volatile_lane(); i < kCount; i += 32) copy(i);
    }
  }

  __device__ __forceinline__ int rows() const { return kGroups ? row_end_ : params_.m; }

  const CompiledParams& params_;
  const uint32_t buffers_;  // of the warp
  int row_end_ = 0;         // of the tile's group, where there are groups
};

template <KernelConfig kConfig, bool kSwapAb, typename Program>
struct OutputOf {
  using Type = CompiledOutput<kConfig, Program>;
};

}  // namespace jax_tcgemm::sm90
