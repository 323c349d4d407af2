// The end of a kernel for packed weights: adds up the sums of a cluster, and writes D or what a
// function compiled at run time makes of the sums.

#pragma once

#include <stdint.h>

#include <type_traits>

#include "compiled_params.h"
#include "packed_config.h"
#include "ptx/cluster.cuh"
#include "ptx/shared_memory.cuh"
#include "sm90/packed/ring.cuh"

namespace jax_tcgemm::sm90 {

// Stands for no function.
struct NoProgram {};

// Columns of D that a thread finishes together.
constexpr int kPackedVector = 4;

// In sm90/packed/function_io.cuh, which only kernels with a function include.
template <typename Program>
struct PackedIo;

// A Program is as in epilogue/compiled_output.cuh, without reductions.
template <PackedConfig kConfig, typename Program>
struct PackedOutput {
  // A thread's sums: register 4 j + 2 h + c belongs to row 16 (warp % 4) + lane / 4 + 8 h of the
  // warpgroup's 64 rows, and to token 8 j + 2 (lane % 4) + c.
  using Sums = float[kConfig.tokens / 2];
  static constexpr int kVector = kPackedVector;  // rows of the tile, which are columns of D
  static constexpr bool kHasFunction = !std::is_same_v<Program, NoProgram>;

  const PackedParams& params;
  const CompiledParams* function;  // null if there is none
  PackedMemory<kConfig> memory;
  PackedPlace<kConfig> place;

  __device__ __forceinline__ uint32_t address(int token, int row) const {
    return memory.start + (token * kConfig.sums_pitch() + row) * 4;
  }

  // Writes a thread's sums over the ring.
  __device__ __forceinline__ void keep(const Sums& sums) const {
    const int thread = threadIdx.x % 128;
    const int row = threadIdx.x / 128 * 64 + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int i = 0; i < kConfig.tokens / 2; ++i) {
      const int token = i / 4 * 8 + thread % 4 * 2 + i % 2;
      ptx::store_shared_4(address(token, row + i / 2 % 2 * 8), sums[i]);
    }
  }

  // Writes the block's share of D. All threads call this, and those of consumer warps write.
  __device__ __forceinline__ void write() const {
    constexpr int kShare = kConfig.columns() / kConfig.split_k;
    constexpr int kVectors = kShare / kVector;
    static_assert(kShare % kVector == 0);
    constexpr int kThreads = 32 * kConfig.consumer_warps();
    const int first = threadIdx.x < kThreads ? threadIdx.x : kVectors * kConfig.tokens;
    sync();
    for (int i = first; i < kVectors * kConfig.tokens; i += kThreads) {
      const int token = i / kVectors;
      const int row = place.rank * kShare + i % kVectors * kVector;
      if (place.token + token >= place.token_end) break;
      const int column = place.row_block * kPackedTile + row;
      if constexpr (kHasFunction) {
        const int32_t extent = params.n;
        if (column >= extent) continue;
        PackedIo<Program> io = {{*function, extent, place.token + token, column}, {}};
#pragma unroll
        for (int w = 0; w < kConfig.weights; ++w)
          add(io.acc[w], token, w * kConfig.columns() + row);
        Program::run(io);
      } else {
        float sum[kVector] = {};
        add(sum, token, row);
        store(sum, place.token + token, column);
      }
    }
    // A block must not end while others read its sums.
    if constexpr (kConfig.split_k > 1) {
      ptx::cluster_arrive_relaxed();
      ptx::cluster_wait();
    }
  }

 private:
  // Adds the sums of all blocks of the cluster, in their order.
  __device__ __forceinline__ void add(float (&sum)[kVector], int token, int row) const {
#pragma unroll
    for (int block = 0; block < kConfig.split_k; ++block) {
      float part[kVector];
      if constexpr (kConfig.split_k > 1) {
        ptx::load_cluster_16(part, address(token, row), block);
      } else {
        ptx::load_shared_16(part, address(token, row));
      }
#pragma unroll
      for (int j = 0; j < kVector; ++j) sum[j] += part[j];
    }
  }

  // Waits until all sums of the tile are in shared memory.
  static __device__ __forceinline__ void sync() {
    if constexpr (kConfig.split_k > 1) {
      asm volatile("barrier.cluster.arrive.release.aligned;\n" ::: "memory");
      ptx::cluster_wait();
    } else {
      __syncthreads();
    }
  }

  __device__ __forceinline__ void store(const float (&sum)[kVector], int token, int column) const {
    constexpr int kBytes = element_bytes(kConfig.output);
    char* d = static_cast<char*>(params.d) +
              ((static_cast<int64_t>(place.batch) * params.m + token) * params.n + column) * kBytes;
    const int count = params.n - column;
    if constexpr (kBytes == 4) {
      if (params.by_vectors) {
        if (count > 0) *reinterpret_cast<float4*>(d) = {sum[0], sum[1], sum[2], sum[3]};
        return;
      }
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        if (j < count) reinterpret_cast<float*>(d)[j] = sum[j];
      }
    } else {
      const uint32_t low = rounded(sum[0], sum[1]);
      const uint32_t high = rounded(sum[2], sum[3]);
      if (params.by_vectors) {
        if (count > 0) *reinterpret_cast<uint2*>(d) = {low, high};
        return;
      }
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const uint32_t pair = j < 2 ? low : high;
        if (j < count) reinterpret_cast<uint16_t*>(d)[j] = j % 2 ? pair >> 16 : pair & 0xffff;
      }
    }
  }

  static __device__ __forceinline__ uint32_t rounded(float first, float second) {
    uint32_t pair;
    if constexpr (kConfig.output == ElementType::kBf16) {
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(pair) : "f"(second), "f"(first));
    } else {
      asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(pair) : "f"(second), "f"(first));
    }
    return pair;
  }
};

}  // namespace jax_tcgemm::sm90
