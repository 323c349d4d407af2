// The ring of a kernel for packed weights: its place in shared memory, and the warps that fill it.

#pragma once

#include <stdint.h>

#include "packed_config.h"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "sm90/packed/groups.cuh"
#include "sm90/ring.cuh"
#include "sm90/tensor_maps.h"

namespace jax_tcgemm::sm90 {

template <PackedConfig kConfig>
struct PackedMemory {
  uint32_t start;  // a multiple of 1024

  __device__ __forceinline__ uint32_t x(int stage) const {
    return start + stage * kConfig.stage_bytes();
  }
  __device__ __forceinline__ uint32_t values(int stage, int row_block) const {
    return x(stage) + kConfig.weights_offset() + row_block * kConfig.row_block_bytes();
  }
  __device__ __forceinline__ uint32_t scales(int stage, int row_block) const {
    return x(stage) + kConfig.scales_offset() + row_block * kConfig.scale_block_bytes();
  }
  __device__ __forceinline__ uint32_t full(int stage) const {
    return start + kConfig.ring_bytes() + 16 * stage;
  }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(stage) + 8; }

  // One thread calls this.
  __device__ __forceinline__ void init() const {
    for (int stage = 0; stage < kConfig.stages; ++stage) {
      ptx::mbarrier_init(full(stage), 2);
      ptx::mbarrier_init(empty(stage), kConfig.consumer_warps());
    }
    ptx::fence_mbarrier_init();
  }
};

// The part of the product that a block computes.
template <PackedConfig kConfig>
struct PackedPlace {
  int row_block;  // the first of the tile
  int token;      // the first of the tile
  int token_end;  // behind the last row of x that the weight multiplies
  int batch;      // of x and D
  int weight;
  int rank;         // in the cluster
  int begin, end;   // stages of k
  int last_groups;  // of the last stage of k
  bool is_empty;    // no tile is left for this block

  // All threads of a block call this together.
  __device__ __forceinline__ PackedPlace(const PackedParams& params, int cluster_rank)
      : row_block(blockIdx.x / (kConfig.split_k * params.token_tiles) * kConfig.output_blocks()),
        token(blockIdx.x / kConfig.split_k % params.token_tiles * kConfig.tokens),
        token_end(params.m),
        batch(blockIdx.y),
        weight(blockIdx.y),
        rank(cluster_rank),
        is_empty(false) {
    const int stages = (params.k_tiles + kConfig.k_blocks - 1) / kConfig.k_blocks;
    begin = rank * stages / kConfig.split_k;
    end = (rank + 1) * stages / kConfig.split_k;
    last_groups = params.groups - (stages - 1) * kConfig.stage_groups();
    if constexpr (kConfig.is_ragged) {
      batch = 0;
      PackedGroups<kConfig.tokens> groups(params);
      is_empty = !groups.find(blockIdx.y);
      weight = groups.group;
      token = groups.token;
      token_end = groups.end;
      // Rows behind all groups have no weight, and their sums are 0.
      if (weight == params.experts) begin = end = 0;
    }
  }
};

// Fills the ring. One thread of each of two warps calls a function of it: a copy takes its thread
// about 100 cycles, so that one thread would be the bottleneck.
template <PackedConfig kConfig>
struct PackedProducer {
  const PackedParams& params;
  const TensorMap& x;
  PackedMemory<kConfig> memory;
  PackedPlace<kConfig> place;

  // Returns the existing blocks of each weight.
  __device__ __forceinline__ int blocks_of_weight() const {
    const int left = (params.n + kPackedTile - 1) / kPackedTile - place.row_block;
    return left < kConfig.output_blocks() ? left : kConfig.output_blocks();
  }
  // Calls load(b, w, i) for each existing block b of the tile, which is block i of weight w.
  template <typename Load>
  __device__ __forceinline__ void each_block(int blocks, const Load& load) const {
#pragma unroll
    for (int b = 0; b < kConfig.row_blocks; ++b) {
      const int i = b % kConfig.output_blocks();
      if (i < blocks) load(b, b / kConfig.output_blocks(), i);
    }
  }

  __device__ __forceinline__ void load_values() const {
    const int blocks = blocks_of_weight();
    const int64_t step = static_cast<int64_t>(params.k_tiles) * kConfig.tile_bytes();
    int64_t from = place.weight * params.values_batch + place.row_block * step +
                   int64_t{place.begin} * kConfig.row_block_bytes();
    RingPosition<kConfig.stages> at;
#pragma unroll 1
    for (int i = place.begin; i < place.end; ++i, at.advance()) {
      const int left = params.k_tiles - kConfig.k_blocks * i;
      const int bytes = (left < kConfig.k_blocks ? left : kConfig.k_blocks) * kConfig.tile_bytes();
      ptx::mbarrier_wait(memory.empty(at.stage), at.phase ^ 1);
      ptx::mbarrier_arrive_expect(memory.full(at.stage), kConfig.weights * blocks * bytes);
      each_block(blocks, [&](int b, int weight, int i) {
        ptx::bulk_load(memory.values(at.stage, b),
                       (weight == 0 ? params.values : params.values2) + from + i * step, bytes,
                       memory.full(at.stage));
      });
      from += kConfig.row_block_bytes();
    }
  }

  __device__ __forceinline__ void load_the_rest() const {
    const int blocks = blocks_of_weight();
    const int64_t step = static_cast<int64_t>(params.groups) * kConfig.group_bytes();
    const int64_t from = place.weight * params.scales_batch + place.row_block * step;
    RingPosition<kConfig.stages> at;
#pragma unroll 1
    for (int i = place.begin; i < place.end; ++i, at.advance()) {
      const int group =
          kConfig.stage_groups() > 1 ? i * kConfig.stage_groups() : i / params.stages_per_group;
      const int left = params.groups - group;
      const int count = left < kConfig.stage_groups() ? left : kConfig.stage_groups();
      const int bytes = count * kConfig.group_bytes();
      ptx::mbarrier_wait(memory.empty(at.stage), at.phase ^ 1);
      ptx::mbarrier_arrive_expect(memory.full(at.stage),
                                  kConfig.weights * blocks * bytes + kConfig.x_bytes());
      ptx::tma_load(memory.x(at.stage), &x, memory.full(at.stage), 0, place.token,
                    kConfig.k_blocks * i, place.batch, 0);
      each_block(blocks, [&](int b, int weight, int i) {
        ptx::bulk_load(memory.scales(at.stage, b),
                       (weight == 0 ? params.scales : params.scales2) + from + i * step +
                           static_cast<int64_t>(group) * kConfig.group_bytes(),
                       bytes, memory.full(at.stage));
      });
    }
  }
};

}  // namespace jax_tcgemm::sm90
