// The parts that all of the consumers' loops over k share: a position in the ring, and the product
// of one stage from shared memory.

#pragma once

#include <stdint.h>

#include "common/dtype.cuh"
#include "kernel_config.h"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/layouts.cuh"
#include "sm90/output/output_tile.h"
#include "sm90/ring.cuh"

namespace jax_tcgemm::sm90 {

// Loop for operands of one layout. A warpgroup multiplies its rows of A by all columns of B.
template <KernelConfig kConfig, typename Layout>
struct StageLoop {
  static constexpr Major kMajorA = Layout::kMajorA;
  static constexpr Major kMajorB = Layout::kMajorB;
  static constexpr int kElementBytes = element_bytes(kConfig.algorithm);
  static constexpr int kBlocks = kConfig.tile_m / (16 * kConfig.warps_m);
  static constexpr int kSteps = 4;  // of 32 bytes of k, in the 128 bytes of a stage
  static constexpr int kConsumerThreads = kConfig.consumer_warps() * 32;
  // Promoting loops: two sets of accumulators alternate if there are enough registers.
  static constexpr bool kTakesTurns = kBlocks * kConfig.tile_n <= 128;
  // Distance between two runs of 128 bytes of mn of an mn-major operand.
  static constexpr int kSlabBytes = kConfig.tile_k * 128;
  using Instruction = ptx::Wgmma<kConfig.algorithm, kConfig.tile_n>;
  using Accumulators = SumOf<kConfig.algorithm>[kBlocks][kConfig.tile_n / 2];

  const SharedMemory<kConfig>& smem;
  int first_row;  // row of the tile where the warpgroup begins
  int lane;
  bool has_partner;  // block `lane` of the cluster loads for this one too
  bool adds_apart;   // skinny rows that promote: sum the stages separately
  const Planes& planes;
  RingPosition<ring_stages(kConfig, kMajorA, kMajorB)> at;

  // Tells the producers that write to this stage that this warp has read it.
  __device__ __forceinline__ void release(int stage) const {
    if constexpr (SharedMemory<kConfig>::kPartners == 1) {
      if (lane == 0) ptx::mbarrier_arrive(smem.empty(stage));
    } else {
      if (has_partner) ptx::mbarrier_arrive_remote(smem.empty(stage), lane);
    }
  }

  static __device__ __forceinline__ void fence(Accumulators& acc) {
#pragma unroll
    for (auto& block : acc) ptx::wgmma_fence_registers(block);
  }

  // Returns an operand's descriptor at a step of k.
  template <Major kMajor, int kRowBytes = 128>
  static __device__ __forceinline__ uint64_t descriptor(uint32_t address) {
    return ptx::matrix_descriptor<kRowBytes>(address, kMajor == Major::kK ? 16 : kSlabBytes);
  }
  template <Major kMajor, int kRowBytes = 128>
  static constexpr int kStepBytes = kMajor == Major::kK ? 32 : 32 / kElementBytes * kRowBytes;
  static constexpr int kRowBytesB =
      kMajorB == Major::kK ? 128 : kConfig.mn_row_bytes(kConfig.tile_n);
  // Distance between two blocks of rows of A.
  static constexpr int kBlockBytes =
      kMajorA == Major::kK ? kBlockRows * 128 : kBlockRows * kElementBytes / 128 * kSlabBytes;

  __device__ __forceinline__ void issue_stage(Accumulators& acc, bool first) const {
    issue_product(acc, at.stage, at.stage, first);
  }

  // Multiplies A in one stage by B in another.
  __device__ __forceinline__ void issue_product(Accumulators& acc, int stage_a, int stage_b,
                                                bool first) const {
    const uint64_t a = descriptor<kMajorA>(smem.a(stage_a) + first_row / kBlockRows * kBlockBytes);
    const uint64_t b = descriptor<kMajorB, kRowBytesB>(smem.b(stage_b));
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        Instruction::template from_shared<kMajorA, kMajorB>(
            acc[i], ptx::advance(a, i * kBlockBytes + step * kStepBytes<kMajorA>),
            ptx::advance(b, step * kStepBytes<kMajorB, kRowBytesB>), step > 0 || !first);
      }
    }
  }

  // Keeps one stage in flight and releases the stage before it.
  template <typename Passed>
  __device__ __forceinline__ void run_from_shared(Accumulators& acc, int count, Passed&& passed) {
    int previous = 0;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      ptx::mbarrier_wait(smem.full(at.stage), at.phase);
      fence(acc);
      ptx::wgmma_fence();
      issue_stage(acc, i == 0);
      ptx::wgmma_commit();
      fence(acc);
      ptx::wgmma_wait<1>();
      if (i > 0) release(previous);
      previous = at.stage;
      at.advance();
    }
    passed();
    ptx::wgmma_wait<0>();
    fence(acc);
    release(previous);
  }

  // Multiplies the next stage. `first`: the stage begins a group and overwrites acc. Returns the
  // index of the stage in the ring.
  __device__ __forceinline__ int begin_stage(Accumulators& acc, bool first) {
    ptx::mbarrier_wait(smem.full(at.stage), at.phase);
    fence(acc);
    ptx::wgmma_fence();
    issue_stage(acc, first);
    ptx::wgmma_commit();
    fence(acc);
    const int stage = at.stage;
    at.advance();
    return stage;
  }

  // Waits until `stage` is done and at most kPending of the begun stages are still being
  // multiplied.
  template <int kPending>
  __device__ __forceinline__ void end_stage(Accumulators& acc, int stage) const {
    ptx::wgmma_wait<kPending>();
    fence(acc);
    release(stage);
  }

  static __device__ __forceinline__ void add(Accumulators& total, const Accumulators& acc) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < kConfig.tile_n / 2; ++j) total[i][j] += acc[i][j];
    }
  }

  static __device__ __forceinline__ void clear(Accumulators& total) {
#pragma unroll
    for (auto& block : total) {
#pragma unroll
      for (auto& value : block) value = 0;
    }
  }
};

}  // namespace jax_tcgemm::sm90
