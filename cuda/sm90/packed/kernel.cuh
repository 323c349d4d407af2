// The kernel for a packed weight and few rows of x. It reads the weight once and is bound by that.
// The rows of a tile are columns of W, its columns rows of x ("tokens"), as the weight's layout is
// that of A's fragments.
//
// Roles: `row_blocks` consumer warpgroups, each with 64 rows of the tile. Two producer warps, in
//        each of which a single thread works (sm90/packed/ring.cuh).
// Barriers: full[stage]: 2 arrivals of the producers + the bytes of the stage. empty[stage]: all
//        consumer warps. Named barrier 1: the barriers are initialised.
// Timeline, producers: initialise -> values | x, scales and zero points   (stage after stage)
//        consumers: decode -> multiply (stage after stage) -> sums into shared memory -> barrier of
//        the cluster -> add the sums of a share of the rows, in the order of the blocks -> D
// Up to 16 tokens are multiplied by mma.sync: its work is proportional to the tokens, and decoding
// goes on beside it. From 32 tokens on wgmma is faster.

#pragma once

#include <stdint.h>

#include "packed_config.h"
#include "ptx/cluster.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/packed_wgmma.cuh"
#include "ptx/shared_memory.cuh"
#include "sm90/packed/decode.cuh"
#include "sm90/packed/output.cuh"
#include "sm90/packed/ring.cuh"

namespace jax_tcgemm::sm90 {

template <PackedConfig kConfig>
struct PackedConsumer {
  using Tile = PackedTile<kConfig>;
  using Scales = PackedScales<kConfig>;
  using Sums = typename PackedOutput<kConfig, NoProgram>::Sums;
  static constexpr Algorithm kAlgorithm =
      Tile::kIsBf16 ? Algorithm::kBf16Bf16F32 : Algorithm::kF16F16F32;
  static constexpr int kGroups = kConfig.tokens / 8;

  const PackedParams& params;
  PackedMemory<kConfig> memory;
  PackedPlace<kConfig> place;
  RingPosition<kConfig.stages> at;
  int warpgroup = threadIdx.x / 128;
  int thread = threadIdx.x % 128;

  __device__ __forceinline__ uint32_t values(int tile) const {
    return memory.values(at.stage, warpgroup) + tile * kConfig.tile_bytes() +
           thread * kConfig.thread_bytes();
  }
  __device__ __forceinline__ uint32_t x(int tile) const {
    return memory.x(at.stage) + tile * kConfig.x_tile_bytes();
  }
  __device__ __forceinline__ Scales scales(int i) const {
    const int stages = (params.k_tiles + kConfig.k_blocks - 1) / kConfig.k_blocks;
    const bool is_last = kConfig.stage_groups() > 1 && i == stages - 1;
    return Scales(memory.scales(at.stage, warpgroup), thread / 32 * 16 + thread % 32 / 4,
                  is_last ? place.last_groups : kConfig.stage_groups());
  }
  __device__ __forceinline__ void release(int stage) const {
    if (thread % 32 == 0) ptx::mbarrier_arrive(memory.empty(stage));
  }
  static constexpr int group_of(int k) { return k / kConfig.group % kConfig.stage_groups(); }

  // --- mma.sync: scales multiply sums ---
  //
  // Statements on shared memory and mma.sync keep their order. Loads therefore stand a step ahead
  // of their use; a step is 32 k.

  static constexpr int kSteps = 2 * kConfig.k_blocks;

  // Fragments of x: for 8 tokens, two registers for each of two blocks of 16 k.
  using XFragments = uint32_t[kGroups][4];

  __device__ __forceinline__ void read_x(XFragments& b, int step) const {
    const int lane = thread % 32;
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      const int chunk = (4 * (step % 2) + lane / 8) ^ (lane % 8);
      ptx::ldmatrix_x4(b[n], x(step / 2) + (8 * n + lane % 8) * 128 + chunk * 16);
    }
  }

  __device__ __forceinline__ void multiply_step(float (&part)[kGroups][4], const Tile& tile,
                                                const XFragments& b, int half, uint32_t zero0,
                                                uint32_t zero1) const {
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      uint32_t a[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        a[r] = tile.value(2 * half + block, r, r % 2 ? zero1 : zero0);
      }
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
        const uint32_t own[2] = {b[n][2 * block], b[n][2 * block + 1]};
        ptx::MmaSync<kAlgorithm>::run(part[n], a, own);
      }
    }
  }

  __device__ __forceinline__ void multiply_stage(float (&sums)[kGroups][4],
                                                 const Scales& scales) const {
    Tile tiles[kConfig.k_blocks];
    XFragments b[2];
#pragma unroll
    for (int i = 0; i < kConfig.k_blocks; ++i) tiles[i].load(values(i));
    read_x(b[0], 0);
    float part[kGroups][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step + 1 < kSteps) read_x(b[(step + 1) % 2], step + 1);
      const int group = group_of(32 * step);
      multiply_step(part, tiles[step / 2], b[step % 2], step % 2, scales.zero(group, 0),
                    scales.zero(group, 1));
      if ((32 * step + 32) % kConfig.unit() != 0) continue;
      const float s0 = scales.scale(group, 0);
      const float s1 = scales.scale(group, 1);
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          sums[n][j] += part[n][j] * (j / 2 ? s1 : s0);
          part[n][j] = 0.f;
        }
      }
    }
  }

  __device__ __forceinline__ void run_by_mma(Sums& acc) {
    float sums[kGroups][4] = {};
#pragma unroll 1
    for (int i = place.begin; i < place.end; ++i, at.advance()) {
      ptx::mbarrier_wait(memory.full(at.stage), at.phase);
      multiply_stage(sums, scales(i));
      __syncwarp();
      release(at.stage);
    }
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) acc[4 * n + j] = sums[n][j];
    }
  }

  // --- wgmma: scales multiply weights ---

  // The fragments of a tile.
  using Fragments = uint32_t[4][4];

  // Zero points and scales of a group, for rows g and g + 8.
  struct Group {
    uint32_t zeros[2];
    typename Scales::Factor factors[2];
  };

  // Decodes tile `i` of a stage that has `count` tiles. Behind them, shared memory has codes of an
  // earlier stage: with the scale they might overflow, and no 0 of x would cancel that. `group` is
  // that of the tile before, or is read here.
  __device__ __forceinline__ void decode(Fragments& fragments, const Tile& tile, int i, int count,
                                         const Scales& scales, Group& group) const {
    const uint32_t mask = i < count ? ~0u : 0u;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const int k = 64 * i + 16 * b;
      if (k % kConfig.unit() == 0) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          group.zeros[half] = scales.zero(group_of(k), half);
          group.factors[half] = scales.factor(group_of(k), half);
        }
      }
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const uint32_t value = tile.value(b, r, group.zeros[r % 2]);
        fragments[b][r] = group.factors[r % 2].times(value, mask);
        // Keeps the decoding in front of the multiplications, which the compiler would otherwise
        // run one by one.
        asm volatile("" : "+r"(fragments[b][r])::"memory");
      }
    }
  }

  // Begins to multiply a tile; the tile before the previous one is done when this returns.
  __device__ __forceinline__ void multiply_tile(Sums& acc, const Fragments& fragments, int i,
                                                bool accumulate) const {
    const uint64_t b = ptx::matrix_descriptor(x(i), 0);
    ptx::wgmma_fence_registers(acc);
    ptx::wgmma_fence();
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      ptx::WgmmaOfRegisters<kAlgorithm, kConfig.tokens>::run(
          acc, fragments[block], ptx::advance(b, 32 * block), accumulate || block > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_fence_registers(acc);
    ptx::wgmma_wait<1>();
  }

  // Two sets of fragments alternate: one is decoded while the other is multiplied.
  __device__ __forceinline__ void run_by_wgmma(Sums& acc) {
    Fragments even;
    Fragments odd;
    int previous = 0;
#pragma unroll 1
    for (int i = place.begin; i < place.end; ++i, at.advance()) {
      ptx::mbarrier_wait(memory.full(at.stage), at.phase);
      const Scales own = scales(i);
      const int count = params.k_tiles - kConfig.k_blocks * i;
      Group group;
      Tile tiles[kConfig.k_blocks];
#pragma unroll
      for (int tile = 0; tile < kConfig.k_blocks; ++tile) tiles[tile].load(values(tile));
#pragma unroll
      for (int tile = 0; tile < kConfig.k_blocks; tile += 2) {
        decode(even, tiles[tile], tile, count, own, group);
        multiply_tile(acc, even, tile, i > place.begin || tile > 0);
        if (tile == 0 && i > place.begin) release(previous);
        decode(odd, tiles[tile + 1], tile + 1, count, own, group);
        multiply_tile(acc, odd, tile + 1, true);
      }
      previous = at.stage;
    }
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_registers(acc);
  }

  __device__ __forceinline__ void run(Sums& acc) {
    if (kConfig.is_ragged && place.begin == place.end) {
#pragma unroll
      for (float& sum : acc) sum = 0.f;
    } else if constexpr (kConfig.uses_wgmma()) {
      run_by_wgmma(acc);
    } else {
      run_by_mma(acc);
    }
  }
};

constexpr int kStartBarrier = 1;  // named barrier 0 is that of __syncthreads

template <PackedConfig kConfig, typename Program = NoProgram>
__device__ __forceinline__ void run_packed(const PackedParams& params, const TensorMap& x,
                                           uint32_t shared,
                                           const CompiledParams* function = nullptr) {
  static_assert(kConfig.k_blocks % 2 == 0);
  const PackedMemory<kConfig> memory = {(shared + 1023) / 1024 * 1024};
  // The shuffles tell the compiler that all lanes have the same values; wgmma needs that.
  const int rank = kConfig.split_k == 1 ? 0 : __shfl_sync(~0u, ptx::cluster_rank(), 0);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const PackedPlace<kConfig> place(params, rank);
  if (place.is_empty) return;  // so are all blocks of the cluster
  const PackedProducer<kConfig> producer = {params, x, memory, place};
  using Output = PackedOutput<kConfig, Program>;
  typename Output::Sums sums;
  // The first copies wait for nothing but the barriers, which their own thread initialises.
  if (warp == kConfig.consumer_warps()) {
    if (threadIdx.x % 32 == 0) memory.init();
    __syncwarp();
    ptx::named_barrier_arrive(kStartBarrier, kConfig.threads());
    if (threadIdx.x % 32 == 0) producer.load_values();
    __syncwarp();
  } else if (warp > kConfig.consumer_warps()) {
    if (threadIdx.x % 32 == 0) ptx::prefetch_tensor_map(&x);
    __syncwarp();
    ptx::named_barrier_sync(kStartBarrier, kConfig.threads());
    if (threadIdx.x % 32 == 0) producer.load_the_rest();
    __syncwarp();
  } else {
    ptx::named_barrier_sync(kStartBarrier, kConfig.threads());
    PackedConsumer<kConfig> consumer = {params, memory, place};
    consumer.run(sums);
  }
  __syncthreads();  // no warp still reads the ring
  const Output output = {params, function, memory, place};
  if (warp < kConfig.consumer_warps()) output.keep(sums);
  output.write();
}

}  // namespace jax_tcgemm::sm90
