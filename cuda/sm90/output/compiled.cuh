// The output of an sm90 kernel whose epilogue was compiled at run time: each warp's is
// epilogue/compiled_output.cuh. This class replaces Output.

#pragma once

#include <stdint.h>

#include "compiled_params.h"
#include "epilogue/accumulator_chunk.cuh"
#include "epilogue/compiled_output.cuh"
#include "sm90/kernel.cuh"
#include "sm90/output/output_tile.h"
#include "sm90/ring.cuh"
#include "sm90/tensor_maps.h"

namespace jax_tcgemm::sm90 {

template <KernelConfig kConfig, typename Program, bool kSwapAb = false>
class CompiledOutput : public CompiledWarpOutput<kConfig, Program, kSwapAb> {
 public:
  using Base = CompiledWarpOutput<kConfig, Program, kSwapAb>;
  using Plan = typename Base::Plan;
  using Accumulators = typename Base::Accumulators;

  __device__ __forceinline__ CompiledOutput(const CompiledParams& params, const TensorMaps&,
                                            const SharedMemory<kConfig>& smem, int /*warpgroup*/)
      : Base(params, smem.output(__shfl_sync(0xffffffff, threadIdx.x / 32, 0))) {}

  // Called before the mainloop of a tile. Rows of a place are rows of accumulators.
  static __device__ __forceinline__ constexpr bool prepares(const TensorMaps&) {
    constexpr bool kAny = Plan::kStages > 0 && Plan::kStageBytes > 0;
    return kAny;
  }
  __device__ __forceinline__ void prepare(const OutputPlace& place) const {
    Base::prepare(of_warp(place));
  }
  __device__ __forceinline__ void share_bias(const OutputPlace&) const {}

  // Called after the mainloop. Only reads acc.
  __device__ __forceinline__ void finish(const Accumulators& acc, const OutputPlace& place) const {
    Base::finish(acc, of_warp(place));
  }

  // Replaces finish if the group has no matrix: the product is zero.
  __device__ __forceinline__ void clear(const OutputPlace& place) const {
    const Accumulators zero = {};
    prepare(place);
    finish(zero, place);
  }

  __device__ __forceinline__ void drain() const {}

 private:
  static __device__ __forceinline__ OutputPlace of_warp(const OutputPlace& place) {
    const int row = place.row + static_cast<int>(threadIdx.x / 32 % 4) * kWarpRows;
    if constexpr (kSwapAb) return {place.column, row, place.batch};
    return {row, place.column, place.batch};
  }
};

template <KernelConfig kConfig, bool kSwapAb, typename Program>
struct OutputOf {
  using Type = CompiledOutput<kConfig, Program, kSwapAb>;
};

}  // namespace jax_tcgemm::sm90
