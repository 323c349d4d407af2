// The sums of a streamed kernel (sm90/streamed_kernel.cuh) and how blocks and warps add them up.
// Each warp sums a quarter of every stage's k. Each block of a cluster sums a part of k.
//
//   registers -> partial: of each warp, over the ring | added up in the warps' order ->
//   received: of each block, at the one that finishes these columns -> add: in the blocks' order

#pragma once

#include <stdint.h>

#include "common/dtype.cuh"
#include "epilogue/accumulator_chunk.cuh"
#include "kernel_config.h"
#include "ptx/cluster.cuh"
#include "ptx/shared_memory.cuh"
#include "sm90/ring.cuh"
#include "sm90/streamed_loop.cuh"

namespace jax_tcgemm::sm90 {

template <KernelConfig kConfig>
struct StreamedSums {
  using Loop = StreamedLoop<kConfig>;
  using Sum = SumOf<kConfig.algorithm>;
  static constexpr int kWarps = kConfig.consumer_warps();
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kColumns = kConfig.output_n();
  static constexpr int kShare = kColumns / kConfig.split_k;  // columns that a block finishes
  static constexpr int kWeights = kConfig.gated ? 2 : 1;
  // Layout of the sums that a block receives.
  static constexpr int kPitch = kConfig.streamed_sums_pitch();
  static constexpr int kSourceBytes = kConfig.tile_m * kPitch * 4;
  static constexpr uint32_t kReceived = kWeights * kConfig.tile_m * kColumns * 4;

  const SharedMemory<kConfig>& smem;
  const int part;  // the block's part of k

  // Returns the address of four neighbouring sums of a warp. The row pitch is 8 words more than a
  // multiple of 32 banks, and runs of 16 bytes in a row trade places, so that 8 threads meet
  // different banks.
  __device__ __forceinline__ uint32_t partial(int warp, int row, int four) const {
    return smem.base + kConfig.streamed_partials_at() +
           (warp * kConfig.tile_m + row) * kConfig.kStreamedPitch * 4 + (four ^ four / 8 % 2) * 16;
  }
  // Returns the address of block `source`'s sums for this block's columns.
  __device__ __forceinline__ uint32_t received(int weight, int source) const {
    return smem.base + kConfig.ring_bytes() - kConfig.streamed_sums_bytes() +
           (weight * kConfig.split_k + source) * kSourceBytes;
  }

  __device__ __forceinline__ void write_partials(const typename Loop::Accumulators& acc) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 8 * i + lane / 4;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        uint32_t word[4];
#pragma unroll
        for (int l = 0; l < 4; ++l) {
          word[l] = Loop::Product::bits(acc[j % 4 * 4 + l][i * 2 + j / 4]);
        }
        ptx::store_shared_16(partial(threadIdx.x / 32, row, lane % 4 * 4 + j / 4 * 16 + j % 4),
                             word);
      }
    }
  }

  // Adds the sums of the block's warps in the warps' order and sends each to the block that
  // finishes its columns.
  __device__ __forceinline__ void send(int weight) const {
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
      const uint32_t to = received(weight, part) + (row * kPitch + column) * 4;
      uint32_t word[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) word[j] = Loop::Product::bits(sum[j]);
      if constexpr (kConfig.split_k == 1) {
        ptx::store_shared_16(to, word);
      } else {
        const int rank = 4 * four / kShare;
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          ptx::store_cluster_8(to + 4 * j, smem.partial_full(), rank, __uint_as_float(word[j]),
                               __uint_as_float(word[j + 1]));
        }
      }
    }
  }

  // Adds 16 x 16 of the block's sums in the blocks' order.
  __device__ __forceinline__ void add(Sum (&value)[kChunkValues], int weight, int column) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kChunkValues; i += 2) {
      const uint32_t at =
          ((lane / 4 + i / 2 % 2 * 8) * kPitch + column + lane % 4 * 2 + i / 4 * 8) * 4;
      value[i] = value[i + 1] = 0;
#pragma unroll
      for (int source = 0; source < kConfig.split_k; ++source) {
        float first, second;
        ptx::load_shared_8(first, second, received(weight, source) + at);
        value[i] += Loop::Product::value(__float_as_uint(first));
        value[i + 1] += Loop::Product::value(__float_as_uint(second));
      }
    }
  }
};

}  // namespace jax_tcgemm::sm90
