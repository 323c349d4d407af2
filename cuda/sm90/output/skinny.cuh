// Turns the accumulators of a skinny kernel into D. Each of the blocks that share a tile adds up a
// share of the sums. A share goes through a slab in shared memory, from which threads read it in
// the order of D.
//
// A thread's accumulators form kSplit equal shares, one for each block. A block sends each share to
// its owner, which adds in the order of the blocks, so the sum is the same every time. The data
// signals its own arrival (st.async), so a block waits for another only for the sums.

#pragma once

#include <stdint.h>

#include "common/dtype.cuh"
#include "epilogue/fused_epilogue.cuh"
#include "epilogue/known.cuh"
#include "epilogue/vector_io.cuh"
#include "gemm_params.h"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_memory.cuh"
#include "sm90/output/output_tile.h"
#include "sm90/ring.cuh"

namespace jax_tcgemm::sm90 {

template <KernelConfig kConfig>
class SkinnyOutput {
 public:
  static constexpr int kBlocks = kConfig.tile_m / kBlockRows;
  static constexpr int kBlockValues = kConfig.tile_n / 2;  // of a thread, in 64 rows
  static constexpr int kSplit = kConfig.split_k;
  static constexpr int kShare = kBlockValues / kSplit;  // values of a thread in a share
  static constexpr int kThreads = 128;
  using Sum = SumOf<kConfig.algorithm>;
  using Accumulators = Sum[kBlocks][kBlockValues];
  using Element = typename AlgorithmTraits<kConfig.algorithm>::Output;
  using Epilogue = FusedEpilogue<Element, kVectorColumns>;
  // Bytes that a block receives for a tile.
  static constexpr int kPartBytes = kBlocks * kShare * 4 * kThreads;
  static constexpr int kReceivedBytes = (kSplit - 1) * kPartBytes;

  __device__ __forceinline__ SkinnyOutput(const GemmParams& params,
                                          const SharedMemory<kConfig>& smem, int block,
                                          bool swap_ab)
      : params_(params), smem_(smem), block_(block), swap_ab_(swap_ab) {}

  // Begins a tile at this first row and column, given along the longer and the shorter extent.
  __device__ __forceinline__ void begin(int first_long, int first_short, int batch) {
    first_long_ = first_long;
    first_short_ = first_short + short_of_share();
    batch_ = batch;
  }

  // Many sums leave no registers for the epilogue's operands, so the kernel fetches them after the
  // mainloop.
  static constexpr bool kFetchesLate = kBlocks * kBlockValues >= 64;

  // Fetches the epilogue's operands for each column. Called before the mainloop unless
  // kFetchesLate.
  __device__ __forceinline__ Epilogue epilogue() const {
    return Epilogue(params_, batch_, column());
  }

  // The operands if D is alpha * sum + bias.
  struct Line {
    float alpha;
    typename Epilogue::Vector bias;
  };
  __device__ __forceinline__ Line line() const {
    const Addend& bias = params_.epilogue.bias;
    Line line = {scalar_of(params_, batch_, params_.epilogue.alpha), {}};
    if (bias.data != nullptr) {
      const int64_t at = batch_offset(params_, batch_, bias.batch) + column() * bias.stride_n;
      load_vector<Element, kVectorColumns>(line.bias, bias, at, params_.n - column());
    }
    return line;
  }

  // Called after the mainloop: adds up this block's share and writes it to the slab. `last`: the
  // block has no other tile.
  __device__ __forceinline__ void collect(const Accumulators& acc, bool last) {
    Sum sum[kBlocks][kShare];
    if constexpr (kSplit == 1) {
      static_assert(kShare == kBlockValues);
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
        for (int j = 0; j < kShare; ++j) sum[i][j] = acc[i][j];
      }
    } else {
      add_up(sum, acc, last);
    }
    // After the barrier, no warp still reads the previous tile's slab.
    ptx::named_barrier_sync(kWarpgroupBarrier, kThreads);
    if (swap_ab_) {
      write<true>(sum);
    } else {
      write<false>(sum);
    }
  }

  // Called after collect: finishes the share and stores it.
  __device__ __forceinline__ void store(const Epilogue& epilogue) const {
    ptx::named_barrier_sync(kWarpgroupBarrier, kThreads);
    visit_rows<kTogether>([&](typename Epilogue::Vector(&value)[kTogether], int row, int step) {
      epilogue.finish(value, row, step);
    });
  }

  // Stores the share if D is the rounded sum.
  __device__ __forceinline__ void store_plain() const {
    store_values([](typename Epilogue::Vector&) {});
  }

  __device__ __forceinline__ void store_line(const Line& line) const {
    store_values([&](typename Epilogue::Vector& value) {
#pragma unroll
      for (int i = 0; i < kVectorColumns; ++i) value[i] = fmaf(line.alpha, value[i], line.bias[i]);
    });
  }

 protected:
  template <typename Finish>
  __device__ __forceinline__ void store_values(Finish&& finish) const {
    ptx::named_barrier_sync(kWarpgroupBarrier, kThreads);
    const EpilogueParams& to = params_.epilogue;
    const int columns = params_.n - column();
    const int64_t first = int64_t{batch_} * params_.m * params_.n + column();
    visit_rows<1>([&](typename Epilogue::Vector(&value)[1], int row, int) {
      if (row >= params_.m) return;
      finish(value[0]);
      store_vector<Element, kVectorColumns>(to.d, known_d_type(to), to.d_vectorizable,
                                            first + int64_t{row} * params_.n, value[0], columns);
    });
  }

  // A share of two values has the upper or the lower 8 of every 16 rows.
  static constexpr bool kHalves = kShare == 2;
  static constexpr int kLong = kHalves ? kConfig.tile_m / 2 : kConfig.tile_m;  // of a share
  static constexpr int kShort = kHalves ? 8 : 2 * kShare;
  static constexpr int kPasses = (kLong * kShort / kVectorColumns + kThreads - 1) / kThreads;
  // Rows of a pass follow one another in D.
  static_assert(!kHalves || kPasses == 1);
  // Passes whose loads are in flight together.
  static constexpr int kTogether = kPasses < 4 ? kPasses : 4;
  // Bytes between two rows of the slab, which are rows of D.
  static constexpr int kSwappedRow = (kLong + KernelConfig::kSkinnyPadding) * 4;
  static constexpr int kRow = (kShort + KernelConfig::kSkinnyPadding) * 4;

  __device__ __forceinline__ int short_of_share() const {
    return kHalves ? block_ / 2 * 8 : block_ * kShort;
  }
  // Returns the index in the tile of a row of the share.
  __device__ __forceinline__ int long_index(int row) const {
    return kHalves ? row / 8 * 16 + block_ % 2 * 8 + row % 8 : row;
  }
  // Vectors of columns in a row of D.
  __device__ __forceinline__ int chunks() const {
    return (swap_ab_ ? kLong : kShort) / kVectorColumns;
  }

  // Returns the first column of D that this thread reads from the slab.
  __device__ __forceinline__ int column() const {
    const int chunk = threadIdx.x % chunks() * kVectorColumns;
    return swap_ab_ ? first_long_ + long_index(chunk) : first_short_ + chunk;
  }

  // Calls visit(vectors, first row of D, distance of rows) for the rows of this thread.
  template <int kCount, typename Visitor>
  __device__ __forceinline__ void visit_rows(Visitor&& visit) const {
    const int row_bytes = swap_ab_ ? kSwappedRow : kRow;
    const int rows = swap_ab_ ? kShort : kLong;
    const int step = kThreads / chunks();
    const int first = swap_ab_ ? first_short_ : first_long_;
    const uint32_t address = slab() + threadIdx.x % chunks() * 16;
#pragma unroll 1
    for (int i = threadIdx.x / chunks(); i < rows; i += kCount * step) {
      typename Epilogue::Vector value[kCount];
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        ptx::load_shared_16(value[j], address + (i + j * step) * row_bytes);
      }
      visit(value, first + (swap_ab_ ? i : long_index(i)), step);
    }
  }

  __device__ __forceinline__ uint32_t slot(int sender) const {
    return smem_.output(0) + sender * kPartBytes + threadIdx.x * 8;
  }
  __device__ __forceinline__ uint32_t slab() const { return smem_.output(0) + kReceivedBytes; }

  // Sends a share. The owner has slots for the other blocks in their order, and none for itself.
  __device__ __forceinline__ void send(const Sum (&share)[kBlocks][kShare], int owner) const {
    const uint32_t first = slot(block_ < owner ? block_ : block_ - 1);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < kShare; j += 2) {
        ptx::store_cluster_8(first + (i * kShare + j) / 2 * kThreads * 8, smem_.partial_full(),
                             owner, share[i][j], share[i][j + 1]);
      }
    }
  }

  // Copies a share out of the accumulators.
  static __device__ __forceinline__ void take(Sum (&share)[kBlocks][kShare],
                                              const Accumulators& acc, int number) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < kShare; ++j) {
        share[i][j] = acc[i][j];
#pragma unroll
        for (int each = 1; each < kSplit; ++each) {
          ptx::replace_if(share[i][j], acc[i][each * kShare + j], each == number);
        }
      }
    }
  }

  __device__ __forceinline__ void add_up(Sum (&sum)[kBlocks][kShare], const Accumulators& acc,
                                         bool last) {
    // After the wait, the other blocks have started and have read the sums of the previous tile.
    __syncwarp();
    if (first_tile_) {
      ptx::cluster_wait();
    } else {
      ptx::mbarrier_wait_cluster(smem_.partial_empty(), phase_ ^ 1);
    }
    Sum own[kBlocks][kShare];
    take(own, acc, block_);
#pragma unroll
    for (int distance = 1; distance < kSplit; ++distance) {
      const int owner = block_ ^ distance;
      Sum share[kBlocks][kShare];
      take(share, acc, owner);
      send(share, owner);
    }
    ptx::mbarrier_wait_cluster(smem_.partial_full(), phase_);
    if (!last && threadIdx.x == 0) {
      ptx::mbarrier_arrive_expect(smem_.partial_full(), kReceivedBytes);
    }
#pragma unroll
    for (int block = 0; block < kSplit; ++block) {
      const uint32_t first = slot(block < block_ ? block : block - 1);
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
        for (int j = 0; j < kShare; j += 2) {
          Sum part[2] = {own[i][j], own[i][j + 1]};
          if (block != block_) {
            ptx::load_shared_8(part[0], part[1], first + (i * kShare + j) / 2 * kThreads * 8);
          }
          sum[i][j] = block == 0 ? part[0] : sum[i][j] + part[0];
          sum[i][j + 1] = block == 0 ? part[1] : sum[i][j + 1] + part[1];
        }
      }
    }
    if (!last) {
      __syncwarp();
      const int lane = threadIdx.x % 32;
      if (lane < kSplit) ptx::mbarrier_arrive_cluster(smem_.partial_empty(), lane);
    }
    first_tile_ = false;
    phase_ ^= 1;
  }

  // kSwapAb: rows of the accumulators are columns of D.
  template <bool kSwapAb>
  __device__ __forceinline__ void write(const Sum (&sum)[kBlocks][kShare]) const {
    constexpr int kLongStep = kSwapAb ? 4 : kRow;
    constexpr int kShortStep = kSwapAb ? kSwappedRow : 4;
    const int lane = threadIdx.x % 32;
    const int row = threadIdx.x / 32 * (kHalves ? 8 : kWarpRows) + lane / 4;
    const uint32_t first = slab() + row * kLongStep + lane % 4 * 2 * kShortStep;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < kShare; ++j) {
        const int rows = i * (kLong / kBlocks) + j / 2 % 2 * 8;
        const int columns = j / 4 * 8 + j % 2;
        ptx::store_shared_4(first + rows * kLongStep + columns * kShortStep, sum[i][j]);
      }
    }
  }

  const GemmParams& params_;
  const SharedMemory<kConfig>& smem_;
  int block_;  // of the blocks that share a tile
  bool swap_ab_;
  int first_long_;
  int first_short_;
  int batch_;
  bool first_tile_ = true;
  uint32_t phase_ = 0;
};

}  // namespace jax_tcgemm::sm90
