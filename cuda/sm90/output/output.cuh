// Turns accumulators into D: by unrolled code if there is little to do (sm90/output/unrolled.cuh),
// by a loop for any epilogue (sm90/output/fused.cuh). Both use the buffers of
// sm90/output/output_buffers.cuh.

#pragma once

#include <stdint.h>

#include "epilogue/known.cuh"
#include "epilogue/vector_io.cuh"
#include "gemm_params.h"
#include "ptx/cluster.cuh"
#include "ptx/shared_memory.cuh"
#include "sm90/output/fused.cuh"
#include "sm90/output/output_buffers.cuh"
#include "sm90/output/output_tile.h"
#include "sm90/output/subtile.cuh"
#include "sm90/output/unrolled.cuh"
#include "sm90/ring.cuh"
#include "sm90/tensor_maps.h"

namespace jax_tcgemm::sm90 {

template <KernelConfig kConfig, bool kSwapAb>
class Output {
 public:
  static constexpr int kBlocks = kConfig.tile_m / (16 * kConfig.warps_m);
  static constexpr int kBlockValues = kConfig.tile_n / 2;  // of a thread, in 64 rows
  using Accumulators = float[kBlocks][kBlockValues];
  using Element = typename AlgorithmTraits<kConfig.algorithm>::Output;

  __device__ __forceinline__ Output(const GemmParams& params, const TensorMaps& maps,
                                    const SharedMemory<kConfig>& smem, int warpgroup)
      : params_(params), maps_(maps), warpgroup_(warpgroup), buffers_(params, maps, smem) {}

  // Called before the mainloop of a tile: starts loading its first C. Places are those of the
  // warpgroup.
  static __device__ __forceinline__ bool prepares(const TensorMaps& maps) { return maps.c_by_tma; }
  __device__ __forceinline__ void prepare(const OutputPlace& place) {
    if constexpr (kConfig.split_k > 1 || kConfig.epilogue == EpilogueWork::kNone) return;
    if (maps_.c_by_tma) buffers_.prefetch_c(fused<true>().sub, of_warp(place));
  }

  // Called while the mainloop's last instructions run: fetches the bias, followed by that of a
  // second weight.
  __device__ __forceinline__ void share_bias(const OutputPlace& place) const {
    if constexpr (!kSwapAb) {
      const EpilogueParams& epilogue = params_.epilogue;
      if (epilogue.bias.data == nullptr && epilogue.bias2.data == nullptr) return;
      // After the barrier, no warp still reads the previous tile's bias.
      ptx::named_barrier_sync(kWarpgroupBarrier + warpgroup_, 128);
#pragma unroll 1
      for (int i = threadIdx.x % 128; i < kConfig.tile_n; i += 128) {
        const bool second = i >= kConfig.output_n();
        const float value = load_bias(second ? epilogue.bias2 : epilogue.bias, place.batch,
                                      place.column + i % kConfig.output_n());
        ptx::store_shared_4(bias_address() + i * 4, value);
      }
      ptx::named_barrier_sync(kWarpgroupBarrier + warpgroup_, 128);
    }
  }

  // Called after the mainloop. Only reads acc.
  __device__ __forceinline__ void finish(const Accumulators& acc, const OutputPlace& tile_place) {
    const OutputPlace place = of_warp(tile_place);
    switch (known_finish(maps_.finish)) {
      case Finish::kProduct:
        return unrolled_for_d<Finish::kProduct>(acc, place);
      case Finish::kAddBias:
        return unrolled<false, Finish::kAddBias>(acc, place);
      case Finish::kAddC:
        return unrolled<false, Finish::kAddC>(acc, place);
      case Finish::kRows:
        return unrolled_for_d<Finish::kRows>(acc, place);
      case Finish::kActivate:
        if constexpr (kHas<Finish::kActivate>) fused<false>().run(acc, place);
        return;
      case Finish::kAnything:
        if constexpr (kHas<Finish::kAnything>) fused<true>().run(acc, place);
        return;
    }
  }

  // Replaces finish if acc is the sum of parts and D is the batch's one matrix. It is separate from
  // finish: if other code wrote to the accumulators before, ptxas would make instructions of the
  // mainloop wait for one another.
  __device__ __forceinline__ void finish_sum(const Accumulators& acc,
                                             const OutputPlace& tile_place) {
    const OutputPlace place = of_warp({tile_place.row, tile_place.column, 0});
    switch (known_finish(maps_.finish)) {
      case Finish::kAddBias:
        return unrolled<false, Finish::kAddBias>(acc, place);
      case Finish::kActivate:
        if constexpr (kHas<Finish::kActivate>) fused<false>().run(acc, place);
        return;
      case Finish::kAnything:
        if constexpr (kHas<Finish::kAnything>) fused<true>().run(acc, place);
        return;
      default:
        return unrolled<false, Finish::kProduct>(acc, place);
    }
  }

  // Called before finish: sets the end of the rows of the tile's group.
  __device__ __forceinline__ void limit_rows(int end) { buffers_.row_end = end; }

  // Replaces finish if the group has no matrix: writes zeros.
  __device__ __forceinline__ void clear(const OutputPlace& place) const {
    buffers_.clear_rows(place, kBlocks * kBlockRows);
  }

  __device__ __forceinline__ void drain() const { buffers_.drain(); }

 private:
  __device__ __forceinline__ OutputPlace of_warp(const OutputPlace& place) const {
    return {place.row + buffers_.warp % 4 * kWarpRows, place.column, place.batch};
  }

  __device__ __forceinline__ float load_bias(const Addend& bias, int batch, int column) const {
    if (bias.data == nullptr || column >= params_.n) return 0.f;
    const int64_t begin = batch_offset(params_, batch, bias.batch);
    return load<Element>(bias, begin + column * bias.stride_n);
  }

  __device__ __forceinline__ uint32_t bias_address() const {
    return buffers_.smem.bias(warpgroup_);
  }

  template <bool kGeneral>
  __device__ __forceinline__ FusedOutput<kConfig, kSwapAb, kGeneral> fused() {
    return {params_, buffers_, {known_d_type(params_.epilogue)}, bias_address()};
  }

  // Chooses the code for D's type. With 16-bit operands D may be float32.
  template <Finish kFinish>
  __device__ __forceinline__ void unrolled_for_d(const Accumulators& acc,
                                                 const OutputPlace& place) {
    if (sizeof(Element) == 4 || known_d_type(params_.epilogue) == ElementType::kF32) {
      return unrolled<true, kFinish>(acc, place);
    }
    unrolled<false, kFinish>(acc, place);
  }

  // Host code asks for no other Finish.
  template <Finish kFinish>
  static constexpr bool kHas = has_finish(kConfig, kFinish, kSwapAb);

  template <bool kWide, Finish kFinish>
  __device__ __forceinline__ void unrolled(const Accumulators& acc, const OutputPlace& place) {
    if constexpr (kHas<kFinish>) {
      UnrolledOutput<kConfig, kSwapAb, kWide || sizeof(Element) == 4, kFinish>{params_, buffers_,
                                                                               bias_address()}
          .run(acc, place);
    }
  }

  const GemmParams& params_;
  const TensorMaps& maps_;
  int warpgroup_;
  OutputBuffers<kConfig, kSwapAb> buffers_;
};

}  // namespace jax_tcgemm::sm90
