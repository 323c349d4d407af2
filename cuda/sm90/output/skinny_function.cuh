// The output of a skinny kernel whose epilogue was compiled at run time: a Program
// (epilogue/compiled_output.cuh) gets the sums of a share in blocks of 16 x 16 values of D, or of 8
// x 32 along the longer extent. The results are few, so they go straight to memory.

#pragma once

#include <stdint.h>

#include "compiled_params.h"
#include "epilogue/accumulator_chunk.cuh"
#include "epilogue/compiled_io.cuh"
#include "epilogue/compiled_output.cuh"
#include "epilogue/compiled_values.cuh"
#include "ptx/cluster.cuh"
#include "ptx/shared_memory.cuh"
#include "scheduler/raster.cuh"
#include "sm90/output/output_tile.h"
#include "sm90/output/skinny.cuh"
#include "sm90/ring.cuh"

namespace jax_tcgemm::sm90 {

// A Program's view of four blocks of 8 x 8 values of D that follow one another along the longer
// extent, kStep apart. A thread has a pair of neighbouring columns in each.
template <KernelConfig kConfig, typename Program, int kStep>
struct NarrowIo : CompiledIo<DirectPlan<kConfig, Program>> {
  using Base = CompiledIo<DirectPlan<kConfig, Program>>;
  bool along_columns;  // whether the longer extent is that of the columns

  __device__ __forceinline__ int m(int i) const {
    return Base::row + (along_columns ? 0 : i / 2 * kStep);
  }
  __device__ __forceinline__ int n(int i) const {
    return Base::column + i % 2 + (along_columns ? i / 2 * kStep : 0);
  }
  template <typename T, int kIndex>
  __device__ __forceinline__ MatrixValues<T> rows() const {
    return loaded<T, kIndex>(
        [&](int64_t begin, int i) { return Base::template load<T, kIndex>(begin, m(i), 0); });
  }
  template <typename T, int kIndex>
  __device__ __forceinline__ MatrixValues<T> columns() const {
    return loaded<T, kIndex>(
        [&](int64_t begin, int i) { return Base::template load<T, kIndex>(begin, 0, n(i)); });
  }
  template <typename T, int kIndex>
  __device__ __forceinline__ MatrixValues<T> matrix() const {
    return loaded<T, kIndex>(
        [&](int64_t begin, int i) { return Base::template load<T, kIndex>(begin, m(i), n(i)); });
  }
  template <typename T, int kIndex>
  __device__ __forceinline__ void write(const ValueOf<T> (&value)[kChunkValues]) const {
#pragma unroll
    for (int i = 0; i < kChunkValues; i += 2) {
      Base::template store_global_pair<T, kIndex>(m(i), n(i), value[i], value[i + 1]);
    }
  }
  // Host code gives such rows no program that reduces: blocks share the 16 x 16 values.
  template <typename T, int kIndex, Along kAlong, typename Join>
  __device__ __forceinline__ void reduce(ValueOf<T> (&)[kChunkValues], ValueOf<T>) const = delete;

 private:
  template <typename T, int kIndex, typename Load>
  __device__ __forceinline__ MatrixValues<T> loaded(Load&& load) const {
    const int64_t begin = Base::template batch_begin<kIndex>();
    MatrixValues<T> values;
#pragma unroll
    for (int i = 0; i < kChunkValues; ++i) values[i] = load(begin, i);
    return values;
  }
};

// Replaces SkinnyOutput.
template <KernelConfig kConfig, typename Program>
class SkinnyFunction : public SkinnyOutput<kConfig> {
 public:
  using Base = SkinnyOutput<kConfig>;

  __device__ __forceinline__ SkinnyFunction(const CompiledParams& params,
                                            const SharedMemory<kConfig>& smem, int block,
                                            bool swap_ab)
      : Base(params, smem, block, swap_ab), params_(params) {}

  // Called before the mainloop: prefetches the operands of the warp's first block.
  __device__ __forceinline__ void prefetch() const {
    prefetch_operands<Program>(params_, place_of(threadIdx.x / 32 % kCount));
  }

  // Called after collect.
  __device__ __forceinline__ void run() const {
    ptx::named_barrier_sync(kWarpgroupBarrier, Base::kThreads);
    const int row_bytes = Base::swap_ab_ ? Base::kSwappedRow : Base::kRow;
    const int row = threadIdx.x % 32 / 4;
    const int column = threadIdx.x % 4 * 2;
#pragma unroll 1
    for (int block = threadIdx.x / 32; block < kCount; block += Base::kThreads / 32) {
      const OutputPlace at = place_of(block);
      if (at.row >= params_.m || at.column >= params_.n) continue;
      const CompiledIo<DirectPlan<kConfig, Program>> wide = {
          params_, 0, 0, at.row + row, at.column + column, at.batch, column, {}};
      const SlabPlace in_slab = slab_place(block);
      const uint32_t from =
          Base::slab() + (in_slab.row + row) * row_bytes + (in_slab.column + column) * 4;
      if constexpr (kIsNarrow) {
        NarrowIo<kConfig, Program, kStep> io = {wide, Base::swap_ab_};
        const uint32_t step = Base::swap_ab_ ? 8 * 4 : 8 * row_bytes;
        load_sums(io.acc, from, row_bytes, [&](int i) { return i / 2 * step; });
        Program::run(io);
      } else {
        auto io = wide;
        load_sums(io.acc, from, row_bytes,
                  [&](int i) { return i / 2 % 2 * 8 * row_bytes + i / 4 * 8 * 4; });
        Program::run(io);
      }
    }
  }

 private:
  // Loads the sums of the product with each weight. offset(i) is the place of value i in the slab.
  template <typename Offset>
  __device__ __forceinline__ void load_sums(typename Base::Sum (&acc)[2][kChunkValues],
                                            uint32_t from, int row_bytes, Offset&& offset) const {
    const uint32_t weight = kWeightLong * (Base::swap_ab_ ? 4 : row_bytes);
#pragma unroll
    for (int product = 0; product < (kConfig.gated ? 2 : 1); ++product) {
#pragma unroll
      for (int i = 0; i < kChunkValues; i += 2) {
        ptx::load_shared_8(acc[product][i], acc[product][i + 1],
                           from + product * weight + offset(i));
      }
    }
  }

  // A share has blocks of 16 x 16 values of D; a narrow one has blocks of 8 values along the
  // shorter extent and 32 along the longer one.
  static constexpr bool kIsNarrow = Base::kShort % kChunkColumns != 0;
  static constexpr int kAcross = kIsNarrow ? 8 : kChunkColumns;
  static constexpr int kAlong = kIsNarrow ? 32 : kChunkColumns;
  static constexpr int kStep = Base::kHalves ? 16 : 8;
  static constexpr int kWeightLong = kConfig.gated ? Base::kLong / 2 : Base::kLong;
  static constexpr int kLongBlocks = kWeightLong / kAlong;
  static constexpr int kCount = kLongBlocks * (Base::kShort / kAcross);

  struct SlabPlace {
    int row, column;
  };
  // Returns the first row and column of a block in the slab.
  __device__ __forceinline__ SlabPlace slab_place(int block) const {
    const int along = block % kLongBlocks * kAlong;
    const int across = block / kLongBlocks * kAcross;
    return Base::swap_ab_ ? SlabPlace{across, along} : SlabPlace{along, across};
  }
  // Returns the first row and column of a block in D.
  __device__ __forceinline__ OutputPlace place_of(int block) const {
    const int along = Base::first_long_ + Base::long_index(block % kLongBlocks * kAlong);
    const int across = Base::first_short_ + block / kLongBlocks * kAcross;
    return {Base::swap_ab_ ? across : along, Base::swap_ab_ ? along : across, Base::batch_};
  }

  const CompiledParams& params_;
};

}  // namespace jax_tcgemm::sm90
