// Split k in a cluster: the blocks that share a tile add up their accumulators. Each block writes
// its accumulators as float32 over its ring and waits for the others. It then finishes a share of
// the rows and adds in the order of the blocks, so the sum is the same every time. The producers
// refill the rings when all blocks have read.

#pragma once

#include <stdint.h>

#include "epilogue/accumulator_slab.cuh"
#include "epilogue/fused_epilogue.cuh"
#include "gemm_params.h"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/tma.cuh"
#include "sm90/output/output.cuh"
#include "sm90/ring.cuh"

namespace jax_tcgemm::sm90 {

template <KernelConfig kConfig>
class SplitOutput {
 public:
  using Accumulators = typename Output<kConfig, false>::Accumulators;
  using Element = typename Output<kConfig, false>::Element;

  __device__ __forceinline__ SplitOutput(const GemmParams& params,
                                         const SharedMemory<kConfig>& smem,
                                         const ClusterPlace<kConfig>& cluster)
      : params_(params), smem_(smem), cluster_(cluster) {}

  // `row` is the warpgroup's first row in the tile, `place` its place in D.
  __device__ __forceinline__ void finish(const Accumulators& acc, int row,
                                         const OutputPlace& place) {
    ptx::named_barrier_sync(kConsumerBarrier, kThreads);  // no warp still reads the ring
    write(acc, row);
    __syncwarp();
    const int lane = threadIdx.x % 32;
    if (lane < kConfig.split_k) {
      ptx::mbarrier_arrive_cluster(smem_.partial_full(),
                                   ClusterPlace<kConfig>::rank(cluster_.m, cluster_.n, lane));
    }
    ptx::mbarrier_wait_cluster(smem_.partial_full(), phase_);
    reduce(place, place.row - row);
    ptx::fence_proxy_async();
    __syncwarp();
    // A release would be a fence that waits for the writes of D. All values that were read are in
    // registers.
    if (lane < kConfig.cluster_size()) ptx::mbarrier_arrive_remote(smem_.partial_empty(), lane);
    phase_ ^= 1;
  }

 private:
  using Slab = AccumulatorSlab<kConfig.tile_n>;
  using Epilogue = FusedEpilogue<Element, kVectorColumns>;
  static constexpr int kThreads = kConfig.consumer_warps() * 32;
  static constexpr int kLanesPerRow = kConfig.tile_n / kVectorColumns;
  static constexpr int kRowsPerPass = kThreads / kLanesPerRow;
  static constexpr int kShare = kConfig.tile_m / kConfig.split_k;  // rows
  static constexpr int kPasses = (kShare + kRowsPerPass - 1) / kRowsPerPass;
  // Rows whose loads are in flight together.
  static constexpr int kTogether = kPasses % 2 == 0 ? 2 : 1;

  __device__ __forceinline__ void write(const Accumulators& acc, int row) const {
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t first_row = row + threadIdx.x / 32 % 4 * kWarpRows + lane / 4;
    const Slab slab = {smem_.a(0)};
    const uint32_t first = slab.address + Slab::offset(first_row, lane % 4 / 2) + lane % 2 * 8;
#pragma unroll
    for (int i = 0; i < Output<kConfig, false>::kBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < Output<kConfig, false>::kBlockValues; j += 2) {
        // Every fourth value is 8 columns further. The slab's XOR keeps this step within 32
        // columns.
        const uint32_t address = (first ^ (j / 4 % 4 * 32)) + j / 16 * 128;
        const int rows = i * kBlockRows + j / 2 % 2 * 8;
        ptx::store_shared_8(address + rows * kConfig.tile_n * 4, acc[i][j], acc[i][j + 1]);
      }
    }
  }

  __device__ __forceinline__ void reduce(const OutputPlace& place, int tile_row) const {
    const int chunk = threadIdx.x % kLanesPerRow;
    const int lane_row = threadIdx.x / kLanesPerRow;
    const Epilogue epilogue(params_, place.batch, place.column + chunk * kVectorColumns);
    const int first_row = cluster_.k * kShare + lane_row;
    if (lane_row >= kShare) return;
#pragma unroll 1
    for (int pass = 0; pass < kPasses; pass += kTogether) {
      typename Epilogue::Vector sum[kTogether] = {};
#pragma unroll
      for (int block = 0; block < kConfig.split_k; ++block) {
        const int rank = ClusterPlace<kConfig>::rank(cluster_.m, cluster_.n, block);
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const int row = first_row + (pass + i) * kRowsPerPass;
          float part[4];
          ptx::load_cluster_16(part, smem_.a(0) + Slab::offset(row, chunk), rank);
#pragma unroll
          for (int j = 0; j < 4; ++j) sum[i][j] += part[j];
        }
      }
      epilogue.finish(sum, tile_row + first_row + pass * kRowsPerPass, kRowsPerPass);
    }
  }

  const GemmParams& params_;
  const SharedMemory<kConfig>& smem_;
  const ClusterPlace<kConfig>& cluster_;
  uint32_t phase_ = 0;
};

}  // namespace jax_tcgemm::sm90
