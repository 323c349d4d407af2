// The output of a warp of a kernel whose epilogue was compiled at run time from a function of JAX
// (jax_tcgemm/epilogue), with any operands and any results.
//
// A warp finishes its 16 rows one sub-tile after the other, each of 16, 32 or 64 columns. In sm90
// kernels the warp copies operands with whole vectors of columns to its part of shared memory one
// sub-tile ahead; otherwise it reads them where they are. It gathers the results there, so that it
// can write them as vectors too. Warps do not wait for one another. If the operands are swapped
// (sm90/output/output_tile.h), the warp has 16 columns of D, and a sub-tile has 16, 32 or 64 rows
// of them.
//
//   before the mainloop: cp.async of the first sub-tile's operands
//   the warp: [cp.async of the next one's] -> wait -> accumulators, operands -> Program ->
//             shared memory -> vectors of the results to memory
//
// A Program has kBatched, kBlockScales (sm90/scaled_mainloop.cuh), kOperands, kOperand[], kResults,
// kResult[] (see compiled_params.h), and run(io). run computes 16 x 16 values of each result from
// an instance of CompiledIo.

#pragma once

#include <stdint.h>

#include "compiled_params.h"
#include "epilogue/accumulator_chunk.cuh"
#include "epilogue/compiled_io.cuh"
#include "epilogue/compiled_values.cuh"
#include "kernel_config.h"
#include "ptx/cluster.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/global_memory.cuh"
#include "scheduler/raster.cuh"

namespace jax_tcgemm {

// Prefetches a program's operands of the 16 x 16 values from `at` on.
template <typename Program>
__device__ __forceinline__ void prefetch_operands(const CompiledParams& params,
                                                  const OutputPlace& at) {
  const int lane = threadIdx.x % 32;
  const int row = min(at.row + lane % 16, params.m - 1);
  const int column = min(at.column + lane / 16 * 8, params.n - 1);
  each<Program::kOperands>([&]<int kIndex>() {
    const CompiledOperand& operand = params.operands[kIndex];
    const int64_t element = batch_offset_if<Program::kBatched>(params, at.batch, operand.batch) +
                            row * operand.stride_m + column * operand.stride_n;
    ptx::prefetch_line(static_cast<const char*>(operand.data) +
                       element * Program::kOperand[kIndex].bytes);
  });
}

template <KernelConfig kConfig, typename Program, bool kSwapAb = false>
class CompiledWarpOutput {
 public:
  using Plan = CompiledPlan<kConfig, Program, kSwapAb>;
  static constexpr int kBlocks = kConfig.tile_m / (16 * kConfig.warps_m);
  using Accumulators = typename Plan::Sum[kBlocks][kConfig.warp_n() / 2];

  // `buffers`: the warp's part of shared memory, warp_buffer_bytes.
  __device__ __forceinline__ CompiledWarpOutput(const CompiledParams& params, uint32_t buffers)
      : params_(params), buffers_(buffers) {}

  // Called before the mainloop of a tile. `tile` is the place of the warp's first value; rows are
  // rows of D.
  __device__ __forceinline__ void prepare(const OutputPlace& tile) const {
    if constexpr (kStages > 0) copy_in(place_of(tile, 0), 0);
  }

  // Called after the mainloop, with the same place. Only reads acc.
  __device__ __forceinline__ void finish(const Accumulators& acc, const OutputPlace& tile) const {
#pragma unroll 1
    for (int index = 0; index < kSubtiles; ++index) {
      const int stage = kStages == 2 ? index % 2 : 0;
      const bool is_last = index == kSubtiles - 1;
      if constexpr (kStages == 2) {
        if (!is_last) copy_in(place_of(tile, index + 1), stage ^ 1);
        // an empty group, because the wait counts groups
        if (is_last) ptx::cp_async_commit_group();
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
      store(at);
      __syncwarp();
    }
  }

  // Writes the results of a sub-tile that the warp has gathered in shared memory.
  __device__ __forceinline__ void store(const OutputPlace& at) const {
    each<Program::kResults>([&]<int kIndex>() { copy_out<kIndex>(at); });
  }

  // Called before prepare: sets the end of the rows of the tile's group.
  __device__ __forceinline__ void limit_rows(int end) { row_end_ = end; }

 private:
  static constexpr bool kGroups = kConfig.grouped == Grouped::kM;  // groups of rows of one matrix

  static constexpr int kStages = Plan::kStages;
  static constexpr int kRows = Plan::kRows;
  static constexpr int kColumns = Plan::kColumns;
  static constexpr int kLength = Plan::kLength;
  // Rows of accumulators from block to block: the four warps of an sm90 warpgroup share a block.
  static constexpr int kBlockRows = kConfig.arch == Arch::kSm90 ? 4 * kChunkRows : kChunkRows;
  static constexpr int kBlockSubtiles = Plan::kBlockColumns / kLength;
  static constexpr int kSubtiles = kBlocks * kBlockSubtiles;
  static constexpr int kChunks = kLength / kChunkColumns;  // of a sub-tile
  static constexpr int kBlockChunks = Plan::kBlockColumns / kChunkColumns;

  // Returns the first row and column of a sub-tile.
  static __device__ __forceinline__ OutputPlace place_of(const OutputPlace& tile, int index) {
    const int block = index / kBlockSubtiles;
    const int across = block * kBlockRows;
    const int along = (index - block * kBlockSubtiles) * kLength;
    if constexpr (kSwapAb) return {tile.row + along, tile.column + across, tile.batch};
    return {tile.row + across, tile.column + along, tile.batch};
  }

  __device__ __forceinline__ void run_chunks(const Accumulators& acc, int index,
                                             const OutputPlace& at, int stage) const {
    const int lane = ptx::volatile_lane();
    const int lane_column = lane % 4 * 2;
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int across = lane / 4;
      const int along = chunk * kChunkColumns + lane_column;
      CompiledIo<Plan> io = {params_,
                             buffers_ + stage * Plan::kStageBytes,
                             buffers_,
                             at.row + (kSwapAb ? along : across),
                             at.column + (kSwapAb ? across : along),
                             at.batch,
                             along,
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

  // Starts the copies of the operands of the sub-tile that begins at `at`.
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
    constexpr int kVectors = kRowVectors * (kMatrix ? kRows : 1);
    constexpr int kPitch = Plan::pitch(kKind.bytes, kColumns);
    const CompiledOperand& operand = params_.operands[kIndex];
    const char* const matrix =
        static_cast<const char*>(operand.data) +
        batch_offset_if<Program::kBatched>(params_, at.batch, operand.batch) * kKind.bytes;
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
    // Elements that one store writes.
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
    constexpr int kCount = kRows * kRowVectors;
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
  int row_end_ = 0;         // end of the rows of the tile's group, if there are groups
};

}  // namespace jax_tcgemm
