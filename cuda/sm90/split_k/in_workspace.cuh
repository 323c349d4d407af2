// Split k among blocks that all run on the GPU at the same time. Each block multiplies one part of
// a tile's k, and then adds up and stores the rows of some of the tile's warps. The other parts'
// sums for these rows come through a workspace, which L2 holds, into the ring, which is free by
// then. The block adds them to its own sums in a fixed order, so the result is the same every time.
//
//   a warp whose rows another part stores: accumulators -> workspace -> flag
//   one whose rows this part stores:       flags -> bulk copies -> add to the accumulators
//
// A flag is set when it holds the number of this launch. The warp that waited for a flag clears it.
// The workspace therefore needs no preparation, and its previous content does not matter.

#pragma once

#include <stdint.h>

#include "gemm_params.h"
#include "ptx/cluster.cuh"
#include "ptx/global_memory.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/tma.cuh"
#include "sm90/output/output.cuh"
#include "sm90/ring.cuh"

namespace jax_tcgemm::sm90 {

// The sums of a block's only tile. The second consumer of a pingpong kernel has no tile.
template <KernelConfig kConfig>
class SplitFixup {
 public:
  using Accumulators = typename Output<kConfig, false>::Accumulators;

  __device__ __forceinline__ SplitFixup(const GemmParams& params, const SharedMemory<kConfig>& smem,
                                        int part)
      : fixup_(params.fixup),
        smem_(smem),
        part_(part),
        warp_(__shfl_sync(0xffffffff, threadIdx.x / 32, 0)),
        lane_(threadIdx.x % 32) {
    // The grid lists all blocks of a part before those of the next part.
    const int tiles = params.raster.tiles.divisor * kConfig.cluster_size();
    const int tile = static_cast<int>(blockIdx.x) - part * tiles;
    first_ = (int64_t{tile} * kWarps + warp_) * fixup_.parts;
  }

  // Called after the mainloop. Returns true if this warp must store its rows; acc then holds their
  // sum.
  __device__ __forceinline__ bool run(Accumulators& acc) const {
    ptx::named_barrier_sync(kWarpgroupBarrier, kWarps * 32);  // no warp still reads the ring
    if (warp_ * fixup_.parts / kWarps != part_) {
      send(acc);
      return false;
    }
    const uint32_t from = fetch();
#pragma unroll 1
    for (int i = 0; i < fixup_.parts - 1; ++i) add(acc, from + i * kWarpBytes);
    return true;
  }

 private:
  static constexpr int kBlockValues = Output<kConfig, false>::kBlockValues;
  static constexpr int kWarps = kConfig.warps_m;  // of a tile
  static constexpr int kVectors = kConfig.accumulators() / 4;
  static constexpr int kVectorBytes = 32 * 16;  // of a warp
  static constexpr int kWarpBytes = kVectors * kVectorBytes;
  static_assert(kWarps * kWarpBytes <= kConfig.ring_bytes());

  // Returns the place of a part's accumulators for this warp.
  __device__ __forceinline__ char* partial(int part) const {
    return fixup_.partials + (first_ + part) * kWarpBytes;
  }

  __device__ __forceinline__ void send(const Accumulators& acc) const {
    char* const to = partial(part_) + lane_ * 16;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const float* value = &acc[4 * i / kBlockValues][4 * i % kBlockValues];
      *reinterpret_cast<float4*>(to + i * kVectorBytes) =
          make_float4(value[0], value[1], value[2], value[3]);
    }
    __syncwarp();
    if (lane_ == 0) ptx::store_release(fixup_.flags + first_ + part_, fixup_.launch);
  }

  // Copies the other parts' sums for this warp's rows. Returns their address.
  __device__ __forceinline__ uint32_t fetch() const {
    const int others = fixup_.parts - 1;
    // the first warp whose rows this part stores
    const int first_warp = (part_ * kWarps + others) / fixup_.parts;
    const uint32_t to = smem_.a(0) + (warp_ - first_warp) * others * kWarpBytes;
    if (lane_ <= others && lane_ != part_) {
      uint64_t* const flag = fixup_.flags + first_ + lane_;
      ptx::wait_acquire(flag, fixup_.launch);
      *flag = 0;
    }
    __syncwarp();
    if (lane_ == 0) {
      ptx::fence_proxy_async_global();
      ptx::mbarrier_arrive_expect(smem_.fixup_full(warp_), others * kWarpBytes);
      for (int i = 0; i < others; ++i) {
        ptx::bulk_load(to + i * kWarpBytes, partial(i < part_ ? i : i + 1), kWarpBytes,
                       smem_.fixup_full(warp_));
      }
    }
    ptx::mbarrier_wait(smem_.fixup_full(warp_), 0);
    return to;
  }

  __device__ __forceinline__ void add(Accumulators& acc, uint32_t from) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      float value[4];
      ptx::load_shared_16(value, from + i * kVectorBytes + lane_ * 16);
#pragma unroll
      for (int j = 0; j < 4; ++j) acc[4 * i / kBlockValues][4 * i % kBlockValues + j] += value[j];
    }
  }

  const Fixup& fixup_;
  const SharedMemory<kConfig>& smem_;
  int part_;
  int warp_;
  int lane_;
  int64_t first_;  // first of the warp's partial sums and flags, one of each for each part
};

}  // namespace jax_tcgemm::sm90
