// The sm80 kernel for little work. It has neither stages nor copies, because at this size the time
// goes into fetching instructions and parameters and into one trip to memory.
//
// Roles: A block computes one tile of D. Warp w multiplies parts w, w + split_k, ... of k (64 bytes
//        of k each) and finishes some rows of the sum.
// Barriers: one, between the warps' sums and their addition.
// Timeline: loads of a part of k of A and of B, in flight together -> mma.sync -> their sums, added
//        in float32 -> ... -> to shared memory -> barrier -> sums over the warps, in their order ->
//        epilogue.
//
// In the layout of mma.sync no lane would load many contiguous numbers. But the order of a sum over
// k is free, and so is the order of a tile's rows. Lane 4 g + t therefore holds the t-th 16 bytes
// of k of the g-th rows (columns) of the tile, for both operands. Its part of D then consists of
// pieces of rows.

#pragma once

#include <stdint.h>

#include "common/dtype.cuh"
#include "epilogue/fused_epilogue.cuh"
#include "gemm_params.h"
#include "kernel_config.h"
#include "mma_sync/layouts.h"
#include "ptx/global_memory.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/shared_memory.cuh"
#include "scheduler/raster.cuh"
#include "sm80/direct_params.h"

namespace jax_tcgemm::sm80 {

// A lane's part of kExtent rows of A (columns of B) and of a part of k: kExtent / 8 adjacent rows,
// each with 16 bytes of k. Beyond m and n the lane repeats other rows, whose sums no thread writes.
// Beyond k it holds zeros.
template <typename Element, Major kMajor, int kExtent>
struct DirectFragments {
  static constexpr int kBytes = sizeof(Element);
  static constexpr int kLines = kExtent / 8;
  static constexpr int kElements = 16 / kBytes;  // of k
  static_assert(kLines * kBytes <= 16, "those that lie together are read at once");

  uint32_t line[kLines][4];

  // `first`: the tile's first row; `k`: the first k of the part. kWhole: the part ends within k.
  template <bool kWhole>
  __device__ __forceinline__ void load(const void* data, int64_t ld, int first, int extent, int k,
                                       int end_k) {
    const int mn = first + threadIdx.x % 32 / 4 * kLines;
    k += threadIdx.x % 4 * kElements;
    const auto* const base = static_cast<const Element*>(data);
    if constexpr (kMajor == Major::kK) {
#pragma unroll
      for (int i = 0; i < kLines; ++i) {
        ptx::load_global<kWhole>(line[i], base + min(mn + i, extent - 1) * ld + k, k < end_k);
      }
    } else {
      uint32_t word[kElements][kLines * kBytes / 4];  // of the lines at one k
      // The last of the adjacent rows may lie beyond the extent, but not beyond the memory.
      const Element* const at = base + k * ld + min(mn, (extent - 1) / kLines * kLines);
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        ptx::load_global<kWhole>(word[i], at + i * ld, k + i < end_k);
      }
      transpose(word);
    }
    if constexpr (kBytes == 4) {
#pragma unroll
      for (auto& words : line) {
#pragma unroll
        for (uint32_t& word : words) ptx::round_to_tf32(word);
      }
    }
  }

 private:
  template <int kWords>
  __device__ __forceinline__ void transpose(const uint32_t (&word)[kElements][kWords]) {
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (kBytes == 4) {
          line[i][j] = word[j][i];
        } else {
          line[i][j] =
              __byte_perm(word[2 * j][i / 2], word[2 * j + 1][i / 2], i % 2 ? 0x7632 : 0x5410);
        }
      }
    }
  }
};

// The product of one matrix of the batch.
struct DirectProduct {
  const void* a;
  const void* b;
  int64_t ld_a, ld_b;
  int m, n, k;
};

template <KernelConfig kConfig>
struct DirectTile {
  using Input = typename AlgorithmTraits<kConfig.algorithm>::Input;
  using Mma = ptx::MmaSync<kConfig.algorithm>;
  static constexpr int kM = kConfig.tile_m / 16;
  static constexpr int kN = kConfig.tile_n / 8;
  static constexpr int kPart = kConfig.tile_k;
  static_assert(kPart * sizeof(Input) == 64, "a quarter of a part is 16 bytes");

  // Vectors of neighbouring columns of the sum. All vectors of a thread have the same columns.
  static constexpr int kRowVectors = kConfig.tile_n / kVectorColumns;
  static constexpr int kRowStep = kConfig.threads() / kRowVectors;
  static constexpr int kVectors = kRowStep < kConfig.tile_m ? kConfig.tile_m / kRowStep : 1;

  typename Mma::Accumulator sum[kM][kN] = {};

  template <Major kMajorA, Major kMajorB>
  __device__ __forceinline__ void multiply(const DirectProduct& p, int row, int column) {
#pragma unroll 1
    for (int k = threadIdx.x / 32 * kPart; k < p.k; k += kConfig.split_k * kPart) {
      DirectFragments<Input, kMajorA, kConfig.tile_m> a;
      DirectFragments<Input, kMajorB, kConfig.tile_n> b;
      if (k + kPart <= p.k) {
        a.template load<true>(p.a, p.ld_a, row, p.m, k, p.k);
        b.template load<true>(p.b, p.ld_b, column, p.n, k, p.k);
      } else {
        a.template load<false>(p.a, p.ld_a, row, p.m, k, p.k);
        b.template load<false>(p.b, p.ld_b, column, p.n, k, p.k);
      }
      add_products(a.line, b.line);
    }
  }

  // Adds up the sums of all warps in `memory`, shared memory of shared_memory_bytes(). Returns
  // false if there are no vectors left for this thread.
  __device__ __forceinline__ bool add_up(uint32_t memory,
                                         Vector<kVectorColumns> (&value)[kVectors]) const {
    constexpr int kPitch = kConfig.direct_pitch() * 4;
    constexpr int kSlab = kConfig.tile_m * kPitch;
    const uint32_t own = memory + threadIdx.x / 32 * kSlab;
    const int group = threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      const uint32_t row = own + (group * 2 * kM + i) * kPitch;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int column = (threadIdx.x % 4 * 2 + c) * kN;
#pragma unroll
        for (int j = 0; j < kN; j += 2) {
          ptx::store_shared_8(row + (column + j) * 4, of(i, j, c), of(i, j + 1, c));
        }
      }
    }
    __syncthreads();
    if (first_row() >= kConfig.tile_m) return false;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const uint32_t at = memory + (first_row() + i * kRowStep) * kPitch + first_column() * 4;
      ptx::load_shared_16(value[i], at);
#pragma unroll
      for (int warp = 1; warp < kConfig.split_k; ++warp) {
        float other[4];
        ptx::load_shared_16(other, at + warp * kSlab);
#pragma unroll
        for (int j = 0; j < 4; ++j) value[i][j] += other[j];
      }
    }
    return true;
  }

  // Row and column of this thread's vectors in the tile.
  static __device__ __forceinline__ int first_row() { return threadIdx.x / kRowVectors; }
  static __device__ __forceinline__ int first_column() {
    return threadIdx.x % kRowVectors * kVectorColumns;
  }

 private:
  __device__ __forceinline__ void add_products(const uint32_t (&a)[2 * kM][4],
                                               const uint32_t (&b)[kN][4]) {
#pragma unroll
    for (int i = 0; i < kM; ++i) {
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        // The tensor cores truncate sums, so the sums of each part are added separately.
        typename Mma::Accumulator part = {};
#pragma unroll
        for (int half = 0; half < 4; half += 2) {
          const auto& first = a[2 * i];
          const auto& second = a[2 * i + 1];
          const uint32_t rows[4] = {first[half], second[half], first[half + 1], second[half + 1]};
          const uint32_t columns[2] = {b[j][half], b[j][half + 1]};
          Mma::run(part, rows, columns);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[i][j][e] += part[e];
      }
    }
  }

  // Returns the sum in the lane's i-th row of the tile, in the j-th column of the lane's c-th
  // group.
  __device__ __forceinline__ float of(int i, int j, int c) const {
    return sum[i / 2][j][i % 2 * 2 + c];
  }
};

// The body of the kernels, in a block with `memory`.
template <KernelConfig kConfig>
struct DirectKernel {
  using Traits = AlgorithmTraits<kConfig.algorithm>;
  using Input = typename Traits::Input;
  using Tile = DirectTile<kConfig>;

  // Computes any epilogue and any batch. `visit`: as in mma_sync::visit_majors.
  template <typename Visit>
  static __device__ __forceinline__ void run(const GemmParams& params, uint32_t memory,
                                             Visit&& visit) {
    const int row = blockIdx.y * kConfig.tile_m;
    const int column = blockIdx.x * kConfig.tile_n;
    const int batch = blockIdx.z;
    const auto matrix = [&](const Operand& operand) {
      return static_cast<const Input*>(operand.data) + batch_offset(params, batch, operand.batch);
    };
    const DirectProduct product = {matrix(params.a), matrix(params.b), params.a.ld, params.b.ld,
                                   params.m,         params.n,         params.k};
    Tile tile;
    visit([&]<typename Layout>(Layout) {
      tile.template multiply<Layout::kA, Layout::kB>(product, row, column);
    });
    Vector<kVectorColumns> value[Tile::kVectors];
    if (!tile.add_up(memory, value)) return;
    FusedEpilogue<typename Traits::Output, kVectorColumns>(params, batch,
                                                           column + Tile::first_column())
        .finish(value, row + Tile::first_row(), Tile::kRowStep);
  }

  // Computes D = alpha * A * B + bias with at most one batch dimension. This takes little code, and
  // its parameters take few lines of the constant cache.
  template <Major kMajorA, Major kMajorB>
  static __device__ __forceinline__ void run_plain(const DirectParams& p, uint32_t memory) {
    const int row = blockIdx.y * kConfig.tile_m;
    const int column = blockIdx.x * kConfig.tile_n;
    const DirectProduct product = {static_cast<const Input*>(p.a) + blockIdx.z * p.batch_a,
                                   static_cast<const Input*>(p.b) + blockIdx.z * p.batch_b,
                                   p.ld_a,
                                   p.ld_b,
                                   p.m,
                                   p.n,
                                   p.k};
    const int at = column + Tile::first_column();
    Vector<kVectorColumns> bias =
        {};  // converted, so waited for, before the operands are asked for
    if (p.bias.data != nullptr) {
      const int64_t first = blockIdx.z * p.bias.batch.stride[0] + at * p.bias.stride_n;
      load_vector<typename Traits::Output, kVectorColumns>(bias, p.bias, first, p.n - at);
    }
    Tile tile;
    tile.template multiply<kMajorA, kMajorB>(product, row, column);
    Vector<kVectorColumns> value[Tile::kVectors];
    if (!tile.add_up(memory, value)) return;
#pragma unroll
    for (int i = 0; i < Tile::kVectors; ++i) {
      const int line = row + Tile::first_row() + i * Tile::kRowStep;
      if (line >= p.m) continue;
#pragma unroll
      for (int j = 0; j < kVectorColumns; ++j) value[i][j] = fmaf(p.alpha, value[i][j], bias[j]);
      const int64_t element = (int64_t{blockIdx.z} * p.m + line) * p.n + at;
      store_vector<typename Traits::Output, kVectorColumns>(p.d, p.d_type, p.d_vectorizable,
                                                            element, value[i], p.n - at);
    }
  }
};

template <typename Row>
__global__ void __launch_bounds__(Row::kConfig.threads())
    direct_kernel(const __grid_constant__ GemmParams params,
                  const __grid_constant__ mma_sync::Layouts layouts) {
  extern __shared__ __align__(128) char memory[];
  DirectKernel<Row::kConfig>::run(params, ptx::shared_address(memory),
                                  [&](auto&& use) { mma_sync::visit_majors(layouts, use); });
}

template <typename Row, Major kMajorA, Major kMajorB>
__global__ void __launch_bounds__(Row::kConfig.threads())
    direct_plain_kernel(const __grid_constant__ DirectParams p) {
  extern __shared__ __align__(128) char memory[];
  DirectKernel<Row::kConfig>::template run_plain<kMajorA, kMajorB>(p, ptx::shared_address(memory));
}

}  // namespace jax_tcgemm::sm80
