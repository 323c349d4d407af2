// How accumulators become D.
//
// By TMA: each warp's 16 rows go in sub-tiles through buffers of its own in shared memory. C, where
// there is one, was loaded into the same buffer before, as far ahead as there are buffers, and
// gives way to D. Warps do not wait for one another.
//
//   a warp:      [C -> registers] -> epilogue -> buffer -> fence
//   its lane 0:                                            -> store -> until a buffer is free [->
//   C]
//
// Directly: what TMA cannot address goes 16 rows at a time through a slab of each warp's own, like
// the sm80 kernels' (epilogue/fused_epilogue.cuh).

#pragma once

#include <stdint.h>

#include "epilogue/accumulator_slab.cuh"
#include "epilogue/fused_epilogue.cuh"
#include "gemm_params.h"
#include "ptx/cluster.cuh"
#include "ptx/tma.cuh"
#include "sm90/mainloop.cuh"
#include "sm90/output_tile.h"
#include "sm90/ring.cuh"
#include "sm90/subtile.cuh"
#include "sm90/tensor_maps.h"

namespace jax_tcgemm::sm90 {

// Where accumulators belong: their first row and column, of D or of D^T.
struct OutputPlace {
  int row;
  int column;
  int batch;
};

template <KernelConfig kConfig, bool kExchanged>
class Output {
 public:
  static constexpr int kBlocks = kConfig.tile_m / (16 * kConfig.warps_m);
  static constexpr int kBlockValues = kConfig.tile_n / 2;  // of a thread, in 64 rows
  using Accumulators = float[kBlocks][kBlockValues];
  using Element = typename AlgorithmTraits<kConfig.algorithm>::Element;

  __device__ __forceinline__ Output(const GemmParams& params, const TensorMaps& maps,
                                    const SharedMemory<kConfig>& smem, int warpgroup)
      : params_(params),
        maps_(maps),
        smem_(smem),
        warpgroup_(warpgroup),
        warp_(__shfl_sync(0xffffffff, threadIdx.x / 32, 0)) {}

  // Before the mainloop of a tile: sends for its first C. Places are those of the warpgroup.
  __device__ __forceinline__ void prepare(const OutputPlace& place) {
    if constexpr (kConfig.plain_only() || kConfig.split_k > 1) return;
    dispatch_type(
        [&]<bool kWide>(Type<kWide>) { prefetch_c<Subtile<kWide, false>>(of_warp(place)); });
  }

  // While its last instructions run: fetches the bias.
  __device__ __forceinline__ void share_bias(const OutputPlace& place) const {
    if constexpr (!kExchanged && !kConfig.plain_only()) {
      if (params_.epilogue.bias.data == nullptr || !maps_.d_by_tma) return;
      // No warp still reads the bias of the tile before.
      ptx::named_barrier_sync(kWarpgroupBarrier + warpgroup_, 128);
#pragma unroll 1
      for (int column = threadIdx.x % 128; column < kConfig.tile_n; column += 128) {
        ptx::store_shared_4(bias_address(column), load_bias(place.batch, place.column + column));
      }
      ptx::named_barrier_sync(kWarpgroupBarrier + warpgroup_, 128);
    }
  }

  // After it. acc is only read.
  __device__ __forceinline__ void finish(const Accumulators& acc, const OutputPlace& tile_place) {
    const OutputPlace place = of_warp(tile_place);
    dispatch_type([&]<bool kWide>(Type<kWide>) {
      if (kConfig.plain_only() || maps_.plain) {
        finish_plain<Subtile<kWide, true>>(acc, place);
      } else if constexpr (!kConfig.plain_only()) {
        if (kExchanged || maps_.d_by_tma) {
          finish_fused<Subtile<kWide, false>>(acc, place);
        } else {
          finish_directly(acc, place);
        }
      }
    });
  }

  // Before the block ends: shared memory must outlive the stores that read it.
  __device__ __forceinline__ void drain() const {
    if (lane() == 0) ptx::tma_store_wait_read<0>();
  }

 private:
  template <bool kWide>
  struct Type {};

  __device__ __forceinline__ OutputPlace of_warp(const OutputPlace& place) const {
    return {place.row + warp_ % 4 * kWarpRows, place.column, place.batch};
  }

  static __device__ __forceinline__ uint32_t lane() { return ptx::volatile_lane(); }

  // kWide: D is float32.
  template <typename Visitor>
  __device__ __forceinline__ void dispatch_type(Visitor&& visit) const {
    if constexpr (sizeof(Element) == 4) {
      visit(Type<true>());
    } else if (params_.epilogue.d_is_float32) {
      visit(Type<true>());
    } else {
      visit(Type<false>());
    }
  }

  __device__ __forceinline__ float load_bias(int batch, int column) const {
    const Addend& bias = params_.epilogue.bias;
    if (bias.data == nullptr || column >= params_.n) return 0.f;
    const int64_t at = batch_offset(params_, batch, bias.batch) + column * bias.stride_n;
    return bias.is_float32 ? static_cast<const float*>(bias.data)[at]
                           : float(static_cast<const Element*>(bias.data)[at]);
  }

  __device__ __forceinline__ uint32_t bias_address(int column) const {
    return smem_.bias(warpgroup_) + column * 4;
  }

  template <bool kWide, bool kPlain>
  using Subtile = OutputSubtile<kConfig, Element, kWide, kExchanged, kPlain>;
  template <typename Sub>
  static constexpr int kSubtiles = kBlocks * Sub::kPerBlock;

  // Buffers between a sub-tile and the last one whose C is on its way.
  template <typename Sub>
  __device__ __forceinline__ int c_ahead() const {
    return params_.epilogue.aux != nullptr ? Sub::kBuffers / 2 - 1 : Sub::kBuffers - 1;
  }
  __device__ __forceinline__ int buffers_per_subtile() const {
    return params_.epilogue.aux != nullptr ? 2 : 1;
  }

  template <typename Sub>
  __device__ __forceinline__ uint32_t buffer_address(int buffer) const {
    return smem_.output(warp_) + buffer * Sub::kBytes;
  }

  // First row and column of a sub-tile.
  template <typename Sub>
  static __device__ __forceinline__ OutputPlace subtile_place(const OutputPlace& place, int index) {
    const int block = index / Sub::kPerBlock;
    const int rest = index - block * Sub::kPerBlock;
    return {place.row + block * kBlockRows, place.column + rest * Sub::kColumns, place.batch};
  }

  // Calls visit(column, row) with where the box of a sub-tile begins in D.
  template <typename Visitor>
  static __device__ __forceinline__ void visit_box(const OutputPlace& at, Visitor&& visit) {
    kExchanged ? visit(at.row, at.column) : visit(at.column, at.row);
  }

  // By lane 0.
  template <typename Sub>
  __device__ __forceinline__ void load_c(const OutputPlace& place, int index, int buffer) const {
    const uint32_t barrier = smem_.c_full(warp_, buffer);
    ptx::mbarrier_arrive_expect(barrier, Sub::kBytes);
    visit_box(subtile_place<Sub>(place, index), [&](int x, int y) {
      ptx::tma_load(buffer_address<Sub>(buffer), &maps_.c, barrier, x, y,
                    maps_.c_moves ? place.batch : 0);
    });
  }

  template <typename Sub>
  __device__ __forceinline__ void prefetch_c(const OutputPlace& place) {
    if (lane() == 0) {
      ptx::tma_store_wait_read<0>();
      for (int i = 0; i < c_ahead<Sub>() && i < kSubtiles<Sub>; ++i) {
        load_c<Sub>(place, i, (buffer_ + i * buffers_per_subtile()) % Sub::kBuffers);
      }
    }
    __syncwarp();
  }

  // Writes a sub-tile to its buffer, which is free, sends it off and waits until the next is.
  template <typename Sub>
  __device__ __forceinline__ void emit(const float (&value)[Sub::kValues], const TensorMap& map,
                                       const OutputPlace& at) {
    const uint32_t buffer = buffer_address<Sub>(buffer_);
    Sub::store(value, buffer);
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane() == 0) {
      visit_box(at, [&](int x, int y) { ptx::tma_store(&map, buffer, x, y, at.batch); });
      ptx::tma_store_commit();
      ptx::tma_store_wait_read<Sub::kBuffers - 1>();
    }
    __syncwarp();
    buffer_ = buffer_ + 1 == Sub::kBuffers ? 0 : buffer_ + 1;
  }

  // Adds beta * C to a sub-tile.
  template <typename Sub>
  __device__ __forceinline__ void add_c(float (&value)[Sub::kValues], const OutputPlace& place,
                                        int index, float beta) {
    // Where a sub-tile takes all buffers, nothing could be sent for ahead of time.
    if (c_ahead<Sub>() == 0 && lane() == 0) {
      ptx::tma_store_wait_read<0>();
      load_c<Sub>(place, index, buffer_);
    }
    ptx::mbarrier_wait(smem_.c_full(warp_, buffer_), c_phases_ >> buffer_ & 1);
    c_phases_ ^= 1 << buffer_;
    Sub::add(value, buffer_address<Sub>(buffer_), beta);
  }

  // Sends for the C of a later sub-tile, when one has been emitted.
  template <typename Sub>
  __device__ __forceinline__ void send_for_c(const OutputPlace& place, int index) {
    const int ahead = c_ahead<Sub>();
    if (ahead == 0 || index + ahead >= kSubtiles<Sub>) return;
    if (lane() == 0) {
      ptx::tma_store_wait_read<1>();
      // buffer_ is that of sub-tile index + 1 by now.
      load_c<Sub>(place, index + ahead,
                  (buffer_ + (ahead - 1) * buffers_per_subtile()) % Sub::kBuffers);
    }
    __syncwarp();
  }

  // Without arithmetic. Unrolled, for accumulators need no moves then: this code runs once a tile,
  // so that fetching its instructions is what takes the time.
  template <typename Sub>
  __device__ __forceinline__ void finish_plain(const Accumulators& acc, const OutputPlace& place) {
    constexpr int kValues = Sub::kValues;
#pragma unroll
    for (int index = 0; index < kSubtiles<Sub>; ++index) {
      float value[kValues];
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        const int flat = index * kValues + i;
        value[i] = acc[flat / kBlockValues][flat % kBlockValues];
      }
      emit<Sub>(value, maps_.d, subtile_place<Sub>(place, index));
    }
  }

  template <typename Sub>
  __device__ __forceinline__ void finish_fused(const Accumulators& acc, const OutputPlace& place) {
    const EpilogueParams& epilogue = params_.epilogue;
    const float alpha = scalar_of(params_, place.batch, epilogue.alpha);
    const float beta = scalar_of(params_, place.batch, epilogue.beta);
#pragma unroll 1
    for (int index = 0; index < kSubtiles<Sub>; ++index) {
      float value[Sub::kValues];
      take<Sub>(value, acc, index);
      const OutputPlace at = subtile_place<Sub>(place, index);
      float bias[Sub::kBiasValues];
      read_bias<Sub>(bias, at, at.column - place.column);
#pragma unroll
      for (int i = 0; i < Sub::kValues; ++i) {
        value[i] = fmaf(alpha, value[i], bias[Sub::bias_index(i)]);
      }
      if (maps_.c_by_tma) add_c<Sub>(value, place, index, beta);
      if (epilogue.aux != nullptr) emit<Sub>(value, maps_.aux, at);
      visit_activation(epilogue.activation, [&]<ActivationFunctor Functor>(Functor) {
        apply_activation<Functor>(value);
      });
      emit<Sub>(value, maps_.d, at);
      if (maps_.c_by_tma) send_for_c<Sub>(place, index);
    }
  }

  // A sub-tile's accumulators. Registers have no index at run time: a move for each candidate.
  template <typename Sub>
  static __device__ __forceinline__ void take(float (&value)[Sub::kValues], const Accumulators& acc,
                                              int index) {
    constexpr int kValues = Sub::kValues;
#pragma unroll
    for (int candidate = 0; candidate < kSubtiles<Sub>; ++candidate) {
      if (candidate != index) continue;
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        const int flat = candidate * kValues + i;
        value[i] = acc[flat / kBlockValues][flat % kBlockValues];
      }
    }
  }

  template <typename Sub>
  __device__ __forceinline__ void read_bias(float (&bias)[Sub::kBiasValues], const OutputPlace& at,
                                            int tile_column) const {
    if (params_.epilogue.bias.data == nullptr) {
#pragma unroll
      for (float& value : bias) value = 0.f;
      return;
    }
    if constexpr (kExchanged) {
      bias[0] = load_bias(at.batch, at.row + lane() / 4);
      bias[1] = load_bias(at.batch, at.row + lane() / 4 + 8);
    } else {
#pragma unroll
      for (int i = 0; i < Sub::kBiasValues; i += 2) {
        ptx::load_shared_8(bias[i], bias[i + 1],
                           bias_address(tile_column + 4 * i + 2 * (lane() % 4)));
      }
    }
  }

  // 32 columns at a time.
  __device__ __forceinline__ void finish_directly(const Accumulators& acc,
                                                  const OutputPlace& place) const {
    using Slab = AccumulatorSlab<32>;
    using Epilogue = FusedEpilogue<Element, kVectorColumns>;
    constexpr int kRowsPerPass = 4;
    const uint32_t lane = this->lane();
    const Slab slab = {smem_.output(warp_)};
#pragma unroll 1
    for (int index = 0; index < kBlocks * kConfig.tile_n / 32; ++index) {
      float value[16];
      take_pairs(value, acc, index);
      const int block = index / (kConfig.tile_n / 32);
      const int column = index % (kConfig.tile_n / 32) * 32;
#pragma unroll
      for (int i = 0; i < 16; i += 2) {
        slab.store_pair(lane / 4 + i / 2 % 2 * 8, i / 4 * 8 + lane % 4 * 2,
                        {value[i], value[i + 1]});
      }
      __syncwarp();
      const Epilogue epilogue(params_, place.batch, place.column + column + lane % 8 * 4);
#pragma unroll 1
      for (int i = lane / 8; i < Slab::kRows; i += 2 * kRowsPerPass) {
        typename Epilogue::Vector row[2];
        slab.load_vector(row[0], i, lane % 8);
        slab.load_vector(row[1], i + kRowsPerPass, lane % 8);
        epilogue.finish(row, place.row + block * kBlockRows + i, kRowsPerPass);
      }
      __syncwarp();
    }
  }

  static __device__ __forceinline__ void take_pairs(float (&value)[16], const Accumulators& acc,
                                                    int index) {
#pragma unroll
    for (int candidate = 0; candidate < kBlocks * kConfig.tile_n / 32; ++candidate) {
      if (candidate != index) continue;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int flat = candidate * 16 + i;
        value[i] = acc[flat / kBlockValues][flat % kBlockValues];
      }
    }
  }

  const GemmParams& params_;
  const TensorMaps& maps_;
  const SharedMemory<kConfig>& smem_;
  int warpgroup_;
  int warp_;
  int buffer_ = 0;         // the next one to be written
  uint32_t c_phases_ = 0;  // of each buffer's c_full barrier, a bit each
};

}  // namespace jax_tcgemm::sm90
