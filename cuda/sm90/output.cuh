// How accumulators become D: without arithmetic (here) or with an epilogue (sm90/fused_output.cuh),
// through the buffers of sm90/output_buffers.cuh.

#pragma once

#include <stdint.h>

#include "gemm_params.h"
#include "ptx/cluster.cuh"
#include "ptx/shared_memory.cuh"
#include "sm90/fused_output.cuh"
#include "sm90/output_buffers.cuh"
#include "sm90/output_tile.h"
#include "sm90/ring.cuh"
#include "sm90/subtile.cuh"
#include "sm90/tensor_maps.h"

namespace jax_tcgemm::sm90 {

template <KernelConfig kConfig, bool kExchanged>
class Output {
 public:
  static constexpr int kBlocks = kConfig.tile_m / (16 * kConfig.warps_m);
  static constexpr int kBlockValues = kConfig.tile_n / 2;  // of a thread, in 64 rows
  using Accumulators = float[kBlocks][kBlockValues];
  using Element = typename AlgorithmTraits<kConfig.algorithm>::Element;

  __device__ __forceinline__ Output(const GemmParams& params, const TensorMaps& maps,
                                    const SharedMemory<kConfig>& smem, int warpgroup)
      : params_(params), maps_(maps), warpgroup_(warpgroup), buffers_(params, maps, smem) {}

  // Before the mainloop of a tile: sends for its first C. Places are those of the warpgroup.
  __device__ __forceinline__ void prepare(const OutputPlace& place) {
    if constexpr (kConfig.split_k > 1) return;
    if (maps_.c_by_tma) buffers_.prefetch_c(fused_output<Fusion::kAll>().sub, of_warp(place));
  }

  // While its last instructions run: fetches the bias, and behind it that of a second weight.
  __device__ __forceinline__ void share_bias(const OutputPlace& place) const {
    if constexpr (!kExchanged) {
      const EpilogueParams& epilogue = params_.epilogue;
      if (epilogue.bias.data == nullptr && epilogue.bias2.data == nullptr) return;
      // No warp still reads the bias of the tile before.
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

  // After it. acc is only read.
  __device__ __forceinline__ void finish(const Accumulators& acc, const OutputPlace& tile_place) {
    const OutputPlace place = of_warp(tile_place);
    if (!maps_.simple) {
      if (!kConfig.gated && maps_.adds_c) {
        fused_output<Fusion::kC>().run(acc, place);
      } else {
        fused_output<Fusion::kAll>().run(acc, place);
      }
    } else if (!maps_.plain) {
      fused_output<Fusion::kNothing>().run(acc, place);
    } else if constexpr (kConfig.gated) {
      return;  // never plain
    } else if (sizeof(Element) == 4 || params_.epilogue.d_is_float32) {
      finish_plain<OutputSubtile<kConfig, Element, true, kExchanged, true>>(acc, place);
    } else if constexpr (sizeof(Element) == 2) {
      finish_plain<OutputSubtile<kConfig, Element, false, kExchanged, true>>(acc, place);
    }
  }

  __device__ __forceinline__ void drain() const { buffers_.drain(); }

 private:
  __device__ __forceinline__ OutputPlace of_warp(const OutputPlace& place) const {
    return {place.row + buffers_.warp % 4 * kWarpRows, place.column, place.batch};
  }

  __device__ __forceinline__ float load_bias(const Addend& bias, int batch, int column) const {
    if (bias.data == nullptr || column >= params_.n) return 0.f;
    const int64_t at = batch_offset(params_, batch, bias.batch) + column * bias.stride_n;
    return bias.is_float32 ? static_cast<const float*>(bias.data)[at]
                           : float(static_cast<const Element*>(bias.data)[at]);
  }

  __device__ __forceinline__ uint32_t bias_address() const {
    return buffers_.smem.bias(warpgroup_);
  }

  template <Fusion kFusion>
  __device__ __forceinline__ FusedOutput<kConfig, kExchanged, kFusion> fused_output() {
    return {params_, buffers_, {params_.epilogue.d_is_float32}, bias_address()};
  }

  // Unrolled, for accumulators need no moves then: this code runs once a tile, so that fetching its
  // instructions is what takes the time.
  template <typename Sub>
  __device__ __forceinline__ void finish_plain(const Accumulators& acc, const OutputPlace& place) {
#pragma unroll
    for (int index = 0; index < decltype(buffers_)::kChunks; ++index) {
      Chunk value;
#pragma unroll
      for (int i = 0; i < kChunkValues; ++i) {
        const int flat = index * kChunkValues + i;
        value[i] = acc[flat / kBlockValues][flat % kBlockValues];
      }
      const int chunk = index % Sub::kChunks;
      Sub::store(value, buffers_.template address<Sub>(buffers_.set, 0), chunk);
      if (chunk == Sub::kChunks - 1) buffers_.send(Sub(), buffers_.place_of(place, index - chunk));
    }
  }

  const GemmParams& params_;
  const TensorMaps& maps_;
  int warpgroup_;
  OutputBuffers<kConfig, kExchanged> buffers_;
};

}  // namespace jax_tcgemm::sm90
