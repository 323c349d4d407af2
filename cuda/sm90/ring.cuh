// The shared memory of an sm90 block, and the ring of stages between producer and consumers.

#pragma once

#include <stdint.h>

#include "kernel_config.h"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"

namespace jax_tcgemm::sm90 {

// Named barriers: 1 + w for the 128 threads of consumer warpgroup w, and 4 for all consumers.
constexpr int kWarpgroupBarrier = 1;
constexpr int kConsumerBarrier = 4;

// A warp's position in the ring.
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    const bool last = stage == kStages - 1;
    stage = last ? 0 : stage + 1;
    phase ^= last;
  }
  __device__ __forceinline__ void skip(int steps) {
    stage += steps;
    phase ^= stage / kStages & 1;
    stage %= kStages;
  }
};

// Addresses in shared memory: the ring, each warp's output buffers, each warpgroup's bias, the
// barriers.
template <KernelConfig kConfig>
struct SharedMemory {
  static constexpr int kTileWarps = kConfig.warps_m * kConfig.warps_n;
  static constexpr int kMaxBuffers = 4;
  static constexpr int kPartners = kConfig.cluster_m + kConfig.cluster_n - 1;

  uint32_t base;

  __device__ __forceinline__ uint32_t a(int stage) const {
    return base + stage * kConfig.stage_bytes();
  }
  __device__ __forceinline__ uint32_t b(int stage) const {
    return a(stage) + kConfig.operand_bytes(kConfig.tile_m);
  }
  __device__ __forceinline__ uint32_t output(int warp) const {
    return base + kConfig.ring_bytes() + warp * (kConfig.staging_bytes() / 4);
  }
  __device__ __forceinline__ uint32_t bias(int warpgroup) const {
    return base + kConfig.ring_bytes() + kConfig.output_bytes() + warpgroup * kConfig.tile_n * 4;
  }
  __device__ __forceinline__ uint32_t barrier(int index) const {
    return base + kConfig.ring_bytes() + kConfig.output_bytes() + kConfig.bias_bytes() + index * 8;
  }
  // Completes when a stage is full: 1 arrival of the producer and the bytes of both operands.
  __device__ __forceinline__ uint32_t full(int stage) const { return barrier(stage); }
  // Completes when every warp of every block that this block's producer writes to has read a stage.
  __device__ __forceinline__ uint32_t empty(int stage) const {
    return barrier(kConfig.stages + stage);
  }
  // Pingpong: completes when it is this warpgroup's turn to multiply. The other warpgroup's warps
  // arrive.
  __device__ __forceinline__ uint32_t turn(int warpgroup) const {
    return barrier(2 * kConfig.stages + warpgroup);
  }
  // Completes when a warp's output buffer holds a sub-tile of C.
  __device__ __forceinline__ uint32_t c_full(int warp, int buffer) const {
    return barrier(2 * kConfig.stages + 2 + warp * kMaxBuffers + buffer);
  }
  // Split k. partial_full completes when every block that shares this block's tile has written its
  // accumulators over the ring. partial_empty completes when every block of the cluster has read
  // its part of them.
  __device__ __forceinline__ uint32_t partial_full() const {
    return barrier(2 * kConfig.stages + 2 + kConfig.consumer_warps() * kMaxBuffers);
  }
  __device__ __forceinline__ uint32_t partial_empty() const {
    return barrier(2 * kConfig.stages + 3 + kConfig.consumer_warps() * kMaxBuffers);
  }
  // Parts of k: completes when the other parts' sums for a warp's rows have been copied.
  __device__ __forceinline__ uint32_t fixup_full(int warp) const {
    return barrier(2 * kConfig.stages + 4 + kConfig.consumer_warps() * kMaxBuffers + warp);
  }
  static constexpr int kFixupWarps = kConfig.has_fixup() ? kConfig.warps_m : 0;
  // Ragged products (sm90/ragged.cuh). tile_full completes when the producer has written the next
  // tile's place to a slot. tile_empty completes when every warp that computes the tile has read
  // the slot.
  __device__ __forceinline__ uint32_t tile_full(int slot) const {
    return barrier(kBarriers + 2 * slot);
  }
  __device__ __forceinline__ uint32_t tile_empty(int slot) const { return tile_full(slot) + 8; }
  __device__ __forceinline__ uint32_t tile_slot(int slot) const {
    return barrier(kBarriers + 2 * kTileSlots) + slot * kTileSlotBytes;
  }
  static constexpr int kTileSlots = kConfig.grouped != Grouped::kNone ? 2 : 0;
  static constexpr int kTileSlotBytes = 32;
  static constexpr int kBarriers =
      2 * kConfig.stages + 4 + kConfig.consumer_warps() * kMaxBuffers + kFixupWarps;
  static_assert(kBarriers * 8 + kTileSlots * (2 * 8 + kTileSlotBytes) <=
                KernelConfig::kBarrierBytes);

  // One thread calls this before any other uses a barrier.
  __device__ __forceinline__ void init_barriers() const {
    for (int stage = 0; stage < kConfig.stages; ++stage) {
      ptx::mbarrier_init(full(stage), 1);
      ptx::mbarrier_init(empty(stage), kTileWarps * kPartners);
    }
    for (int i = 0; i < 2; ++i) ptx::mbarrier_init(turn(i), 4);
    for (int i = 0; i < kConfig.consumer_warps() * kMaxBuffers; ++i)
      ptx::mbarrier_init(c_full(0, i), 1);
    if constexpr (kConfig.grouped != Grouped::kNone) {
      for (int slot = 0; slot < kTileSlots; ++slot) {
        ptx::mbarrier_init(tile_full(slot), 1);
        ptx::mbarrier_init(tile_empty(slot), kTileWarps);
      }
    }
    for (int i = 0; i < kFixupWarps; ++i) ptx::mbarrier_init(fixup_full(i), 1);
    ptx::mbarrier_init(partial_full(), kTileWarps * kConfig.split_k);
    ptx::mbarrier_init(partial_empty(), kTileWarps * kConfig.cluster_size());
    ptx::fence_mbarrier_init();
  }
};

// A block's place in its cluster along m, n and k.
template <KernelConfig kConfig>
struct ClusterPlace {
  int m = 0;
  int n = 0;
  int k = 0;

  __device__ __forceinline__ ClusterPlace() {
    if constexpr (kConfig.cluster_size() > 1) {
      const int rank = ptx::cluster_rank();
      k = rank % kConfig.split_k;
      n = rank / kConfig.split_k % kConfig.cluster_n;
      m = rank / kConfig.split_k / kConfig.cluster_n;
    }
  }
  static __device__ __forceinline__ int rank(int m, int n, int k) {
    return (m * kConfig.cluster_n + n) * kConfig.split_k + k;
  }
  // Blocks with the same rows of A, and blocks with the same columns of B, one bit each.
  __device__ __forceinline__ uint16_t sharers_of_a() const {
    uint16_t blocks = 0;
    for (int i = 0; i < kConfig.cluster_n; ++i) blocks |= 1 << rank(m, i, k);
    return blocks;
  }
  __device__ __forceinline__ uint16_t sharers_of_b() const {
    uint16_t blocks = 0;
    for (int i = 0; i < kConfig.cluster_m; ++i) blocks |= 1 << rank(i, n, k);
    return blocks;
  }
  // Checks if block `other` of the cluster loads for this one too.
  __device__ __forceinline__ bool shares_with(int other) const {
    const uint32_t blocks = sharers_of_a() | sharers_of_b();
    return other < kConfig.cluster_size() && (blocks >> other & 1);
  }
  // This block's share of k in k-tiles: a share of the whole k, or of part `matrix` of k.
  struct Range {
    int begin, end;
  };
  __device__ __forceinline__ Range k_range(int k_tiles, int split_stages, int matrix) const {
    if constexpr (kConfig.split_k > 1) {
      return {k * k_tiles / kConfig.split_k, (k + 1) * k_tiles / kConfig.split_k};
    }
    if (split_stages == 0) return {0, k_tiles};
    const int begin = matrix * split_stages;
    return {begin, begin + split_stages < k_tiles ? begin + split_stages : k_tiles};
  }
};

}  // namespace jax_tcgemm::sm90
