// The consumers' loop over k: a warpgroup multiplies its rows of A by all columns of B, stage after
// stage of the ring.

#pragma once

#include <stdint.h>

#include "kernel_config.h"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/fragment_reader.cuh"
#include "sm90/layouts.cuh"
#include "sm90/output/output_tile.h"
#include "sm90/ring.cuh"
#include "sm90/tensor_maps.h"

namespace jax_tcgemm::sm90 {

// Of operands of one layout.
template <KernelConfig kConfig, typename Layout>
struct LayoutMainloop {
  static constexpr Major kMajorA = Layout::kMajorA;
  static constexpr Major kMajorB = Layout::kMajorB;
  static constexpr int kElementBytes = element_bytes(kConfig.algorithm);
  static constexpr int kBlocks = kConfig.tile_m / (16 * kConfig.warps_m);
  static constexpr int kSteps = 4;  // of 32 bytes of k, in the 128 of a stage
  static constexpr int kConsumerThreads = kConfig.consumer_warps() * 32;
  // Of a promoting loop: two sets of accumulators take turns, as far as there are registers.
  static constexpr bool kTakesTurns = kBlocks * kConfig.tile_n <= 128;
  static constexpr bool kAFromRegisters = kElementBytes == 4 && kMajorA == Major::kMn;
  // From 128 bytes of mn to the next, of an mn-major operand.
  static constexpr int kSlabBytes = kConfig.tile_k * 128;
  using Instruction = ptx::Wgmma<kConfig.algorithm, kConfig.tile_n>;
  using Accumulators = ptx::SumOf<kConfig.algorithm>[kBlocks][kConfig.tile_n / 2];

  const SharedMemory<kConfig>& smem;
  int first_row;  // of the warpgroup in the tile
  int lane;
  bool has_partner;  // block `lane` of the cluster loads for this one too
  bool adds_apart;   // skinny rows that promote: do so
  const Planes& planes;
  RingPosition<ring_stages(kConfig, kMajorA, kMajorB)> at;

  // Sets acc to the product over `count` stages. `passed` is called when no more instructions are
  // to be issued.
  template <typename Passed>
  __device__ __forceinline__ void run(Accumulators& acc, int count, Passed&& passed) {
    if constexpr (kConfig.skinny) {
      run_at_once(acc, count, passed);
    } else if constexpr (transposes_b(kConfig, kMajorA, kMajorB)) {
      run_transposing(acc, count, passed);
    } else if constexpr (kAFromRegisters) {
      run_from_registers(acc, count, passed);
    } else if constexpr (kConfig.promote) {
      if constexpr (kConfig.takes_planes()) {
        run_planes(acc, count, passed);
      } else {
        clear(acc);
        run_promoting(acc, count, passed);
      }
    } else {
      run_from_shared(acc, count, true, passed);
    }
  }

 private:
  template <KernelConfig>
  friend struct ScaledMainloop;

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

  // An operand's descriptor at a step of k.
  template <Major kMajor, int kRowBytes = 128>
  static __device__ __forceinline__ uint64_t descriptor(uint32_t address) {
    return ptx::matrix_descriptor<kRowBytes>(address, kMajor == Major::kK ? 16 : kSlabBytes);
  }
  template <Major kMajor, int kRowBytes = 128>
  static constexpr int kStepBytes = kMajor == Major::kK ? 32 : 32 / kElementBytes * kRowBytes;
  static constexpr int kRowBytesB =
      kMajorB == Major::kK ? 128 : kConfig.mn_row_bytes(kConfig.tile_n);
  // From one block of rows of A to the next.
  static constexpr int kBlockBytes =
      kMajorA == Major::kK ? kBlockRows * 128 : kBlockRows * kElementBytes / 128 * kSlabBytes;

  __device__ __forceinline__ void issue_stage(Accumulators& acc, bool first) const {
    const uint64_t a = descriptor<kMajorA>(smem.a(at.stage) + first_row / kBlockRows * kBlockBytes);
    const uint64_t b = descriptor<kMajorB, kRowBytesB>(smem.b(at.stage));
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

  // One stage is always in flight; the one before it is released. `is_first`: acc is nothing yet.
  template <typename Passed>
  __device__ __forceinline__ void run_from_shared(Accumulators& acc, int count, bool is_first,
                                                  Passed&& passed) {
    int previous = 0;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      ptx::mbarrier_wait(smem.full(at.stage), at.phase);
      fence(acc);
      ptx::wgmma_fence();
      issue_stage(acc, is_first && i == 0);
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

  // The tensor cores cut sums off; those of few stages, added up in float32, lose little by it: of
  // two where k is so long that what XLA's kernels lose has grown, too. Of products of 8 bits they
  // keep 14 bits, of which the 128 of a stage are enough.
  template <typename Passed>
  __device__ __forceinline__ void run_promoting(Accumulators& total, int count, Passed& passed) {
    if constexpr (!kTakesTurns) {
      run_alone(total, count, passed);
    } else if constexpr (kElementBytes == 1) {
      run_in_groups<1>(total, count, passed);
    } else {
      if (count <= 8) return run_in_groups<1>(total, count, passed);
      run_in_groups<2>(total, count, passed);
    }
  }

  // While it adds, another warpgroup multiplies.
  template <typename Passed>
  __device__ __forceinline__ void run_alone(Accumulators& total, int count, Passed& passed) {
    Accumulators apart;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const int stage = begin_stage(apart, true);
      if (i + 1 == count) passed();
      end_stage<0>(apart, stage);
      add(total, apart);
    }
  }

  // Products of planes, an order after the other. What is cut off counts in the last one alone.
  template <typename Passed>
  __device__ __forceinline__ void run_planes(Accumulators& total, int count, Passed& passed) {
    if (planes.count > 0) {
#pragma unroll 1
      for (int order = planes.order; order > 0; --order) {
        const int stages = planes.products(order) * planes.k_tiles.divisor;
        run_from_shared(total, stages, order == planes.order, [] {});
        raise_order(total, order == 1);
      }
      count = planes.k_tiles.divisor;
    } else {
      clear(total);
    }
    run_promoting(total, count, passed);
  }

  // Of an infinity nothing is left over but NaN, and sums may be beyond float32's range where D is:
  // then the products of order 0 say what D is.
  static __device__ __forceinline__ void raise_order(Accumulators& total, bool is_last) {
#pragma unroll
    for (auto& block : total) {
#pragma unroll
      for (float& value : block) {
        value *= 0x1p-7f;
        if (is_last && !(fabsf(value) <= 0x1.fffffep127f)) value = 0.f;
      }
    }
  }

  // Adds to `total`. Groups of stages take turns with two sets of accumulators, so that one is
  // multiplied while the other is added. What does not fill a group makes a larger one, the first.
  template <int kGroup, typename Passed>
  __device__ __forceinline__ void run_in_groups(Accumulators& total, int count, Passed& passed) {
    Accumulators even;
    Accumulators odd;
    int stage = begin_stage(odd, true);
    int left = count - 1;
#pragma unroll 1
    for (; left % kGroup > 0; --left) stage = extend(odd, stage);
#pragma unroll 1
    while (left > 0) {
      int next = begin_stage(even, true);
      end_stage<1>(odd, stage);
      add(total, odd);
      next = extend_group<kGroup>(even, next);
      left -= kGroup;
      if (left == 0) {
        passed();
        end_stage<0>(even, next);
        return add(total, even);
      }
      stage = begin_stage(odd, true);
      end_stage<1>(even, next);
      add(total, even);
      stage = extend_group<kGroup>(odd, stage);
      left -= kGroup;
    }
    passed();
    end_stage<0>(odd, stage);
    add(total, odd);
  }

  // Multiplies the rest of a group of which a stage has begun.
  template <int kGroup>
  __device__ __forceinline__ int extend_group(Accumulators& acc, int stage) {
#pragma unroll
    for (int i = 1; i < kGroup; ++i) stage = extend(acc, stage);
    return stage;
  }

  // Multiplies one stage more of the group of which `stage` has begun; returns which it is.
  __device__ __forceinline__ int extend(Accumulators& acc, int stage) {
    const int next = begin_stage(acc, false);
    ptx::wgmma_wait<1>();
    release(stage);
    return next;
  }

  // Multiplies the next stage, apart if it is the first of its group; returns which of the ring it
  // is.
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

  // Waits until of the stages begun at most kPending are still being multiplied, `stage` not.
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

  // Where memory is what takes the time: each stage is released at once, to be loaded again. There
  // is time, too, to add up stages apart, if the result shows it.
  template <typename Passed>
  __device__ __forceinline__ void run_at_once(Accumulators& total, int count, Passed& passed) {
    Accumulators apart;
    Accumulators& acc = kConfig.promote ? apart : total;
    if constexpr (kConfig.promote) clear(total);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      ptx::mbarrier_wait(smem.full(at.stage), at.phase);
      fence(acc);
      ptx::wgmma_fence();
      issue_stage(acc, (kConfig.promote && adds_apart) || i == 0);
      ptx::wgmma_commit();
      fence(acc);
      ptx::wgmma_wait<0>();
      release(at.stage);
      at.advance();
      if constexpr (kConfig.promote) {
        fence(acc);
        if (adds_apart || i + 1 == count) add(total, acc);
      }
    }
    fence(total);
    passed();
  }

  static __device__ __forceinline__ void clear(Accumulators& total) {
#pragma unroll
    for (auto& block : total) {
#pragma unroll
      for (auto& value : block) value = 0;
    }
  }

  // A's fragments of one stage.
  using Fragments = uint32_t[kSteps][kBlocks][4];

  __device__ __forceinline__ void read_stage(Fragments& fragments,
                                             const FragmentReader<kSlabBytes>& reader) const {
    const uint32_t a = smem.a(at.stage);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        reader.read(fragments[step][j], a + j * kBlockBytes + step * kStepBytes<kMajorA>);
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

  // Reads the next stage's fragments and multiplies by them, while the stage before is still being
  // multiplied; then releases that one. Returns which of the ring it is.
  __device__ __forceinline__ int multiply_stage(Accumulators& acc, Fragments& fragments,
                                                const FragmentReader<kSlabBytes>& reader,
                                                bool first, int previous) {
    ptx::mbarrier_wait(smem.full(at.stage), at.phase);
    read_stage(fragments, reader);
    issue_from_registers(acc, fragments, descriptor<Major::kK>(smem.b(at.stage)), first);
    ptx::wgmma_wait<1>();
    if (!first) release(previous);
    const int stage = at.stage;
    at.advance();
    return stage;
  }

  // Stages take turns with two sets of fragments, so that one is read while the other is
  // multiplied. Unrolled by hand, here and below: in other forms ptxas spills 128 accumulators.
  template <typename Passed>
  __device__ __forceinline__ void run_from_registers(Accumulators& acc, int count, Passed& passed) {
    const FragmentReader<kSlabBytes> reader(first_row);
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

  // Writes this warp's part of an n-major B to `target` as k-major. A lane has one n and four k.
  __device__ __forceinline__ void transpose_b(uint32_t target) const {
    constexpr int kUnits = kConfig.tile_n / 32 * 8;  // 32 n, 4 k
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

  // Transposes the next stage's B to `buffer` and multiplies by it.
  __device__ __forceinline__ void multiply_transposed(Accumulators& acc, Fragments& fragments,
                                                      const FragmentReader<kSlabBytes>& reader,
                                                      uint32_t buffer, bool first) {
    ptx::mbarrier_wait(smem.full(at.stage), at.phase);
    transpose_b(buffer);
    read_stage(fragments, reader);
    // All of the warp's reads come before what TMA writes next.
    ptx::fence_proxy_async();
    __syncwarp();
    release(at.stage);
    at.advance();
    // Behind the barrier the buffer is written, and the other one no longer read.
    ptx::wgmma_wait<0>();
    fence(acc);
    ptx::named_barrier_sync(kConsumerBarrier, kConsumerThreads);
    issue_from_registers(acc, fragments, descriptor<Major::kK>(buffer), first);
  }

  // While one k-tile is multiplied, B of the next one is transposed and its A read.
  template <typename Passed>
  __device__ __forceinline__ void run_transposing(Accumulators& acc, int count, Passed& passed) {
    const FragmentReader<kSlabBytes> reader(first_row);
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
    // The next tile's first k-tile may go into the buffer that the last one of this tile read.
    ptx::named_barrier_sync(kConsumerBarrier, kConsumerThreads);
  }
};

// Of operands of any of some layouts; keeps its place in the ring from tile to tile.
template <KernelConfig kConfig, typename Layouts>
struct Mainloop {
  static constexpr bool kScales = false;
  static constexpr int kBlocks = kConfig.tile_m / (16 * kConfig.warps_m);
  using Accumulators = ptx::SumOf<kConfig.algorithm>[kBlocks][kConfig.tile_n / 2];

  const GemmParams& params;
  const SharedMemory<kConfig>& smem;
  int first_row;
  bool has_partner;
  RingPosition<ring_stages(kConfig, Layouts())> at;

  __device__ __forceinline__ Mainloop(const GemmParams& params, const SharedMemory<kConfig>& smem,
                                      const ClusterPlace<kConfig>& place, int first_row)
      : params(params), smem(smem), first_row(first_row) {
    has_partner = place.shares_with(threadIdx.x % 32);
  }

  // See LayoutMainloop::run.
  template <typename Passed>
  __device__ __forceinline__ void run(Accumulators& acc, int count, Passed&& passed) {
    visit_layout(Layouts(), params, [&]<typename Layout>(Layout) {
      const int lane = threadIdx.x % 32;
      LayoutMainloop<kConfig, Layout> mainloop = {
          smem,          first_row, lane, has_partner, params.epilogue.d_type == ElementType::kF32,
          params.planes, at};
      mainloop.run(acc, count, passed);
      at = mainloop.at;
    });
  }
};

}  // namespace jax_tcgemm::sm90
