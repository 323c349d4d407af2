// The output of a kernel whose epilogue was compiled at run time from a function of JAX
// (jax_tcgemm/epilogue), with any operands and any results. This class replaces Output.
//
// A warp finishes its 16 rows one sub-tile after the other, each of 16, 32 or 64 columns. The warp
// copies operands with whole vectors of columns to its part of shared memory one sub-tile ahead. It
// gathers the results there, so that it can write them as vectors too. Warps do not wait for one
// another. If the operands are swapped (sm90/output/output_tile.h), the warp has 16 columns of D,
// and a sub-tile has 16, 32 or 64 rows of them.
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
#include "epilogue/compiled_values.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/wgmma.cuh"
#include "scheduler/raster.cuh"
#include "sm90/kernel.cuh"
#include "sm90/output/compiled_io.cuh"
#include "sm90/output/fused.cuh"
#include "sm90/output/output_tile.h"
#include "sm90/output/subtile.cuh"
#include "sm90/ring.cuh"

namespace jax_tcgemm::sm90 {

template <KernelConfig kConfig, typename Program, bool kSwapAb = false>
class CompiledOutput {
 public:
  using Plan = CompiledPlan<kConfig, Program, kSwapAb>;
  static constexpr int kBlocks = kConfig.tile_m / (16 * kConfig.warps_m);
  using Accumulators = typename Plan::Sum[kBlocks][kConfig.tile_n / 2];

  __device__ __forceinline__ CompiledOutput(const CompiledParams& params, const TensorMaps&,
                                            const SharedMemory<kConfig>& smem, int /*warpgroup*/)
      : params_(params), buffers_(smem.output(__shfl_sync(0xffffffff, threadIdx.x / 32, 0))) {}

  // Called before the mainloop of a tile.
  static __device__ __forceinline__ constexpr bool prepares(const TensorMaps&) {
    constexpr bool kAny = Plan::kStages > 0 && Plan::kStageBytes > 0;
    return kAny;
  }
  __device__ __forceinline__ void prepare(const OutputPlace& place) const {
    if constexpr (kStages > 0) copy_in(place_of(of_warp(place), 0), 0);
  }
  __device__ __forceinline__ void share_bias(const OutputPlace&) const {}

  // Called after the mainloop. Only reads acc.
  __device__ __forceinline__ void finish(const Accumulators& acc, const OutputPlace& place) const {
    const OutputPlace tile = of_warp(place);
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

  // Replaces finish if the group has no matrix: the product is zero.
  __device__ __forceinline__ void clear(const OutputPlace& place) const {
    const Accumulators zero = {};
    prepare(place);
    finish(zero, place);
  }

  __device__ __forceinline__ void drain() const {}

 private:
  static constexpr bool kGroups = kConfig.grouped == Grouped::kM;  // groups of rows of one matrix

  static constexpr int kStages = Plan::kStages;
  static constexpr int kRows = Plan::kRows;
  static constexpr int kColumns = Plan::kColumns;
  static constexpr int kLength = Plan::kLength;
  static constexpr int kBlockSubtiles = kConfig.output_n() / kLength;
  static constexpr int kSubtiles = kBlocks * kBlockSubtiles;
  static constexpr int kChunks = kLength / kChunkColumns;  // of a sub-tile
  static constexpr int kBlockChunks = kConfig.output_n() / kChunkColumns;

  // Returns the place of the warp's first value. Rows of `place` are rows of accumulators; those of
  // all other places are rows of D.
  __device__ __forceinline__ OutputPlace of_warp(const OutputPlace& place) const {
    const int row = place.row + static_cast<int>(threadIdx.x / 32 % 4) * kWarpRows;
    if constexpr (kSwapAb) return {place.column, row, place.batch};
    return {row, place.column, place.batch};
  }
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

template <KernelConfig kConfig, bool kSwapAb, typename Program>
struct OutputOf {
  using Type = CompiledOutput<kConfig, Program, kSwapAb>;
};

}  // namespace jax_tcgemm::sm90
