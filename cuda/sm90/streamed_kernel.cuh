// The kernel for few rows of A times an n-major B of 8 bits, which wgmma does not take from shared
// memory. B goes past once; 4 x 4 bytes are turned in registers. Its epilogue is compiled at run
// time (sm90/output/compiled.cuh).
//
// Roles: all warps are alike. A tile's k, 32 rows of B at a time, is dealt to the warps of the
//        blocks of a cluster; then each block finishes equal parts of the tile's columns.
// Barriers: sums_full: 1 + the bytes of all blocks' sums of this block's columns.
// Timeline: the loop over k (sm90/streamed_loop.cuh) -> the warp's sums to shared memory | block |
// the block's sums to the blocks that finish them, by st.async -> wait
//        sums_full -> add -> Program -> results.
// A block computes one tile; of two weights one after the other. That the others of its cluster
// have started is waited for before sums are sent; none is written to after its end, because each
// waits for all that it is sent.
//
// What a thread holds of a step (lane = 4 g + t): of B rows 8 t ... 8 t + 7, columns 16 g ...
// 16 g + 15 of the tile; of A columns 8 t ... 8 t + 7, rows g and g + 8 of every 16. So instruction
// j multiplies columns j, 16 + j, 32 + j ... of the tile, and the k of both operands is permuted
// alike.

#pragma once

#include <stdint.h>

#include "compiled_params.h"
#include "kernel_config.h"
#include "ptx/cluster.cuh"
#include "ptx/global_memory.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_memory.cuh"
#include "scheduler/raster.cuh"
#include "sm90/output/compiled.cuh"
#include "sm90/ring.cuh"
#include "sm90/streamed_loop.cuh"
#include "sm90/tensor_maps.h"

namespace jax_tcgemm::sm90 {

template <KernelConfig kConfig, typename Program>
struct StreamedKernel {
  using Smem = SharedMemory<kConfig>;
  using Loop = StreamedLoop<kConfig, Program::kBatched>;
  using Out = CompiledOutput<kConfig, Program>;
  using Plan = typename Out::Plan;
  using Sum = typename Plan::Sum;
  static constexpr int kThreads = kConfig.threads();
  static constexpr int kWarps = kConfig.consumer_warps();
  static constexpr int kColumns = kConfig.output_n();
  static constexpr int kShare = kColumns / kConfig.split_k;  // columns that a block finishes
  static constexpr int kWeights = kConfig.gated ? 2 : 1;
  // Of the sums that a block is sent.
  static constexpr int kPitch = kConfig.streamed_sums_pitch();
  static constexpr int kSourceBytes = kConfig.tile_m * kPitch * 4;
  static constexpr uint32_t kReceived = kWeights * kConfig.tile_m * kColumns * 4;
  static_assert(kShare % kChunkColumns == 0 && Plan::kColumns == kChunkColumns);

  const CompiledParams& params;
  const Smem& smem;
  const ClusterPlace<kConfig> place;

  __device__ __forceinline__ uint32_t of_warp(int warp) const {
    return smem.base + warp * kConfig.streamed_warp_bytes();
  }
  // Four neighbouring sums of a warp. Rows are 16 words over a multiple of 32 banks' worth, and
  // 16 bytes of a row are swapped by the thread's t, so that 8 threads meet different banks.
  __device__ __forceinline__ uint32_t partial(int warp, int row, int four) const {
    return of_warp(warp) + row * kConfig.kStreamedPitch * 4 + (four ^ four / 8 % 4) * 16;
  }
  // What block `source` says of this block's columns.
  __device__ __forceinline__ uint32_t sums(int weight, int source) const {
    return of_warp(kWarps) + (weight * kConfig.split_k + source) * kSourceBytes;
  }
  __device__ __forceinline__ uint32_t sums_full() const { return smem.barrier(0); }

  __device__ __forceinline__ void write_partials(const typename Loop::Accumulators& acc) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < Loop::kBlocks * 2; ++i) {
      const int row = 8 * i + lane / 4;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        uint32_t word[4];
#pragma unroll
        for (int l = 0; l < 4; ++l) {
          word[l] = Loop::Product::bits(acc[i / 2][j % 4 * 4 + l][i % 2 * 2 + j / 4]);
        }
        ptx::store_shared_16(partial(threadIdx.x / 32, row, lane % 4 * 8 + j), word);
      }
    }
  }

  // Adds up what the block's warps have, in their order, and sends it to the block that finishes
  // it.
  __device__ __forceinline__ void send_sums(int weight) const {
    constexpr int kFours = kColumns / 4;
#pragma unroll
    for (int i = threadIdx.x; i < kConfig.tile_m * kFours; i += kThreads) {
      const int row = i / kFours;
      const int four = i % kFours;
      Sum sum[4] = {};
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) {
        uint32_t word[4];
        ptx::load_shared_16(word, partial(warp, row, four));
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[j] += Loop::Product::value(word[j]);
      }
      const int column = 4 * four % kShare;
      const uint32_t to = sums(weight, place.k) + (row * kPitch + column) * 4;
      uint32_t word[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) word[j] = Loop::Product::bits(sum[j]);
      if constexpr (kConfig.split_k == 1) {
        ptx::store_shared_16(to, word);
      } else {
        const int rank = 4 * four / kShare;
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          ptx::store_cluster_8(to + 4 * j, sums_full(), rank, __uint_as_float(word[j]),
                               __uint_as_float(word[j + 1]));
        }
      }
    }
  }

  // 16 x 16 of the block's sums.
  __device__ __forceinline__ void add(Sum (&value)[kChunkValues], int weight, int row,
                                      int column) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kChunkValues; i += 2) {
      const uint32_t at =
          ((row + lane / 4 + i / 2 % 2 * 8) * kPitch + column + lane % 4 * 2 + i / 4 * 8) * 4;
      value[i] = value[i + 1] = 0;
#pragma unroll
      for (int source = 0; source < kConfig.split_k; ++source) {
        float first, second;
        ptx::load_shared_8(first, second, sums(weight, source) + at);
        value[i] += Loop::Product::value(__float_as_uint(first));
        value[i + 1] += Loop::Product::value(__float_as_uint(second));
      }
    }
  }

  // Sends for the operands of the warp's first 16 x 16: they come while B does.
  __device__ __forceinline__ void prefetch_operands(const OutputPlace& at) const {
    const int chunk = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int row = min(at.row + chunk % Loop::kBlocks * 16 + lane % 16, params.m - 1);
    const int column =
        min(at.column + chunk / Loop::kBlocks * kChunkColumns + lane / 16 * 8, params.n - 1);
    each<Program::kOperands>([&]<int kIndex>() {
      const CompiledOperand& operand = params.operands[kIndex];
      const int64_t element = batch_offset_if<Program::kBatched>(params, at.batch, operand.batch) +
                              row * operand.stride_m + column * operand.stride_n;
      ptx::prefetch_line(static_cast<const char*>(operand.data) +
                         element * Program::kOperand[kIndex].bytes);
    });
  }

  // `at` is the tile's first row, and the first of the block's columns.
  __device__ __forceinline__ void finish(const Out& output, const OutputPlace& at) const {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const uint32_t buffers = smem.output(warp);
#pragma unroll 1
    for (int chunk = warp; chunk < Loop::kBlocks * (kShare / kChunkColumns); chunk += kWarps) {
      const int row = chunk % Loop::kBlocks * 16;
      const int column = chunk / Loop::kBlocks * kChunkColumns;
      CompiledIo<Plan> io = {params,
                             buffers,
                             buffers,
                             at.row + row + lane / 4,
                             at.column + column + lane % 4 * 2,
                             at.batch,
                             lane % 4 * 2,
                             {}};
#pragma unroll
      for (int weight = 0; weight < kWeights; ++weight) add(io.acc[weight], weight, row, column);
      Program::run(io);
      __syncwarp();
      output.store({at.row + row, at.column + column, at.batch});
      __syncwarp();
    }
  }

  __device__ __forceinline__ void multiply(const OutputPlace& tile) const {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
#pragma unroll 1
    for (int weight = 0; weight < kWeights; ++weight) {
      typename Loop::Accumulators acc = {};
      Loop(params, weight == 0 ? params.b.data : params.b2, tile.batch, tile.row + lane / 4,
           tile.column + lane / 4 * Loop::kLaneColumns, place.k * kWarps + warp)
          .run(acc);
      write_partials(acc);
      __syncthreads();
      if (kConfig.split_k > 1 && weight == 0) ptx::cluster_wait();
      send_sums(weight);
      if (weight + 1 < kWeights) __syncthreads();
    }
  }

  static __device__ __forceinline__ void run(const CompiledParams& params, const TensorMaps& maps,
                                             const Smem& smem) {
    const StreamedKernel kernel = {params, smem, {}};
    if constexpr (kConfig.split_k > 1) {
      if (threadIdx.x == 0) {
        ptx::mbarrier_init(kernel.sums_full(), 1);
        ptx::mbarrier_arrive_expect(kernel.sums_full(), kReceived);
        ptx::fence_mbarrier_init();
      }
      __syncwarp();
      ptx::cluster_arrive_relaxed();
    }
    const TileWalk walk(params, blockIdx.x / kConfig.cluster_size());
    const TileCoordinate tile = raster_tile(params.raster, walk.index);
    const OutputPlace at = {tile.tile_m * kConfig.tile_m, tile.tile_n * kColumns, walk.batch};
    const OutputPlace own = {at.row, at.column + kernel.place.k * kShare, at.batch};
    kernel.prefetch_operands(own);
    kernel.multiply(at);
    if constexpr (kConfig.split_k > 1) {
      ptx::mbarrier_wait(kernel.sums_full(), 0);
    } else {
      __syncthreads();
    }
    kernel.finish(Out(params, maps, smem, 0), own);
  }
};

}  // namespace jax_tcgemm::sm90
