// The loop over k with A from registers, for types whose mn-major operands wgmma does not take from
// shared memory. The loop first transposes an n-major B in shared memory.

#pragma once

#include <stdint.h>

#include "kernel_config.h"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/fragment_reader.cuh"
#include "sm90/layouts.cuh"
#include "sm90/stage_loop.cuh"

namespace jax_tcgemm::sm90 {

template <KernelConfig kConfig, typename Layout>
struct RegisterLoop : StageLoop<kConfig, Layout> {
  using Base = StageLoop<kConfig, Layout>;
  using Base::at;
  using Base::fence;
  using Base::first_row;
  using Base::kBlockBytes;
  using Base::kBlocks;
  using Base::kConsumerThreads;
  using Base::kMajorA;
  using Base::kSlabBytes;
  using Base::kSteps;
  using Base::lane;
  using Base::release;
  using Base::smem;
  using typename Base::Accumulators;
  using typename Base::Instruction;
  using Reader = FragmentReader<kSlabBytes, kConfig.pairs>;

  // Stages alternate between two sets of fragments, so that one set is read while the other is
  // multiplied. The loops here and below are unrolled by hand: in other forms ptxas spills 128
  // accumulators.
  template <typename Passed>
  __device__ __forceinline__ void run_from_registers(Accumulators& acc, int count, Passed& passed) {
    const Reader reader(first_row);
    Fragments even;
    Fragments odd;
    int previous = 0;
#pragma unroll 1
    for (int i = 0;; i += 2) {
      previous = multiply_stage(acc, even, reader, i == 0, previous);
      if (i + 1 == count) break;
      previous = multiply_stage(acc, odd, reader, false, previous);
      if (i + 2 == count) break;
    }
    passed();
    ptx::wgmma_wait<0>();
    fence(acc);
    release(previous);
  }

  // While one k-tile is multiplied, the consumers transpose B and read A of the next k-tile.
  template <typename Passed>
  __device__ __forceinline__ void run_transposing(Accumulators& acc, int count, Passed& passed) {
    const Reader reader(first_row);
    const uint32_t buffers = smem.a(kConfig.stages - 1);
    Fragments even;
    Fragments odd;
#pragma unroll 1
    for (int i = 0;; i += 2) {
      multiply_transposed(acc, even, reader, buffers, i == 0);
      if (i + 1 == count) break;
      multiply_transposed(acc, odd, reader, buffers + kConfig.tile_n * 128, false);
      if (i + 2 == count) break;
    }
    passed();
    ptx::wgmma_wait<0>();
    fence(acc);
    // The next tile's first k-tile may go into the buffer that this tile's last k-tile was read
    // from.
    ptx::named_barrier_sync(kConsumerBarrier, kConsumerThreads);
  }

 private:
  // A's fragments of one stage.
  using Fragments = uint32_t[kSteps][kBlocks][4];

  __device__ __forceinline__ void read_stage(Fragments& fragments, const Reader& reader) const {
    const uint32_t a = smem.a(at.stage);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        reader.read(fragments[step][j], a + j * kBlockBytes, step);
      }
    }
  }

  __device__ __forceinline__ void issue_from_registers(Accumulators& acc, Fragments& fragments,
                                                       uint64_t b, bool first) const {
    fence(acc);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        Instruction::from_registers(acc[j], fragments[step][j], ptx::advance(b, step * 32),
                                    step > 0 || !first);
      }
    }
    ptx::wgmma_commit();
    fence(acc);
  }

  // Reads the next stage's fragments and multiplies by them while the previous stage is still being
  // multiplied. Then releases the previous stage. Returns the index of the stage in the ring.
  __device__ __forceinline__ int multiply_stage(Accumulators& acc, Fragments& fragments,
                                                const Reader& reader, bool first, int previous) {
    ptx::mbarrier_wait(smem.full(at.stage), at.phase);
    read_stage(fragments, reader);
    issue_from_registers(acc, fragments, Base::template descriptor<Major::kK>(smem.b(at.stage)),
                         first);
    ptx::wgmma_wait<1>();
    if (!first) release(previous);
    const int stage = at.stage;
    at.advance();
    return stage;
  }

  // Writes this warp's part of an n-major B to `target` in k-major order. A lane has one n and four
  // k.
  __device__ __forceinline__ void transpose_b(uint32_t target) const {
    constexpr int kUnits = kConfig.tile_n / 32 * 8;  // units of 32 n and 4 k
    const uint32_t source = smem.b(at.stage);
#pragma unroll
    for (int i = 0; i < kUnits / kConfig.warps_m; ++i) {
      const int unit = i * kConfig.warps_m + threadIdx.x / 32;
      const int slab = unit / 8;
      const int chunk = unit % 8;
      uint32_t word[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int k = 4 * chunk + j;
        word[j] = ptx::load_shared_4(source + slab * kSlabBytes + k * 128 +
                                     (lane / 4 ^ k % 8) * 16 + lane % 4 * 4);
      }
      ptx::store_shared_16(target + (slab * 32 + lane) * 128 + (chunk ^ lane % 8) * 16, word);
    }
  }

  // Transposes the next stage's B into `buffer` and multiplies by it.
  __device__ __forceinline__ void multiply_transposed(Accumulators& acc, Fragments& fragments,
                                                      const Reader& reader, uint32_t buffer,
                                                      bool first) {
    ptx::mbarrier_wait(smem.full(at.stage), at.phase);
    transpose_b(buffer);
    read_stage(fragments, reader);
    // Orders all of the warp's reads before TMA's next write.
    ptx::fence_proxy_async();
    __syncwarp();
    release(at.stage);
    at.advance();
    // After the barrier, all warps have written this buffer and none reads the other one.
    ptx::wgmma_wait<0>();
    fence(acc);
    ptx::named_barrier_sync(kConsumerBarrier, kConsumerThreads);
    issue_from_registers(acc, fragments, Base::template descriptor<Major::kK>(buffer), first);
  }
};

}  // namespace jax_tcgemm::sm90
