// Stores D if the kernel computed D^T from 16-bit operands and D is alpha * product + bias. Each of
// the four warps of a warpgroup has 16 columns of D, too few for a TMA store of its own. The warps
// write 64 columns of some rows, transposed, to a buffer of the warpgroup.
//
//   all warps:       accumulators -> buffer -> fence -> barrier, behind which the next is free
//   their thread 0:    until the buffer after this one is free ^      -> store

#pragma once

#include <stdint.h>

#include "common/dtype.cuh"
#include "epilogue/vector_io.cuh"
#include "gemm_params.h"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"
#include "sm90/output/output_buffers.cuh"
#include "sm90/output/output_tile.h"
#include "sm90/ring.cuh"
#include "sm90/tensor_maps.h"

namespace jax_tcgemm::sm90 {

// Replaces Output. These rows of the table need none of Output's other tasks.
template <KernelConfig kConfig>
class TransposedOutput {
 public:
  static constexpr int kBlocks = kConfig.tile_m / (16 * kConfig.warps_m);
  using Accumulators = float[kBlocks][kConfig.tile_n / 2];

  __device__ __forceinline__ TransposedOutput(const GemmParams& params, const TensorMaps& maps,
                                              const SharedMemory<kConfig>& smem, int warpgroup)
      : params_(params), maps_(maps), buffers_(smem.output(4 * warpgroup)), warpgroup_(warpgroup) {}

  static __device__ __forceinline__ bool prepares(const TensorMaps&) { return false; }
  __device__ __forceinline__ void prepare(const OutputPlace&) const {}

  // Called while the last instructions run. A thread needs the bias of only two columns in 64, so
  // threads share nothing.
  __device__ __forceinline__ void share_bias(const OutputPlace& place) {
    const EpilogueParams& epilogue = params_.epilogue;
    alpha_ = scalar_of(params_, place.batch, epilogue.alpha);
    const int column = place.row + threadIdx.x / 32 % 4 * kWarpRows + threadIdx.x % 32 / 4;
    const int64_t batch = batch_offset(params_, place.batch, epilogue.bias.batch);
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) {
      const int at = column + i / 2 * kBlockRows + i % 2 * 8;
      bias_[i / 2][i % 2] = kNoBias;
      if (epilogue.bias.data != nullptr && at < params_.n) {
        bias_[i / 2][i % 2] = load<Element>(epilogue.bias, batch + at * epilogue.bias.stride_n);
      }
    }
  }

  // Rows of `place` are columns of D.
  __device__ __forceinline__ void finish(const Accumulators& acc, const OutputPlace& place) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int row = 0; row < kConfig.tile_n; row += kRows) {
        const uint32_t buffer = buffers_ + buffer_ * kBytes;
        write(acc[block], bias_[block], row, buffer);
        send(buffer, place.row + block * kBlockRows, place.column + row, place.batch);
      }
    }
  }

  __device__ __forceinline__ void drain() const { ptx::tma_store_wait_read<0>(); }

 private:
  using Element = typename AlgorithmTraits<kConfig.algorithm>::Output;
  static constexpr int kRows = kConfig.transposed_rows();
  static constexpr int kBuffers = kConfig.transposed_buffers();
  static constexpr int kBytes = kRows * 128;
  static constexpr int kMatrix = 8;  // rows and columns of one matrix of stmatrix
  static_assert(kBuffers > 1);
  // -0 keeps a product of -0; +0 would turn it into +0.
  static constexpr float kNoBias = -0.f;

  // Writes the warp's columns of the rows from `first` on, with TMA's swizzle. `bias`: of the
  // thread's two columns.
  __device__ __forceinline__ void write(const float (&acc)[kConfig.tile_n / 2],
                                        const float (&bias)[2], int first, uint32_t buffer) const {
    const uint32_t lane = ptx::volatile_lane();
    const uint32_t chunk = threadIdx.x / 32 % 4 * 2 + lane / kMatrix % 2;
    const uint32_t to = buffer + lane % kMatrix * 128 + (chunk ^ lane % kMatrix) * 16;
#pragma unroll
    for (int row = 0; row < kRows; row += kMatrix) {
      const float* value = acc + (first + row) / 2;
      const auto scaled = [&](int i) { return fmaf(alpha_, value[i], bias[i / 2]); };
      const uint32_t matrices[2] = {pack<Element>(scaled(0), scaled(1)),
                                    pack<Element>(scaled(2), scaled(3))};
      ptx::stmatrix_x2_trans(to + row * 128, matrices);
    }
  }

  __device__ __forceinline__ void send(uint32_t buffer, int column, int row, int batch) {
    const bool sends = threadIdx.x % 128 == 0;
    ptx::fence_proxy_async();
    if (sends) ptx::tma_store_wait_read<kBuffers - 2>();
    ptx::named_barrier_sync(kWarpgroupBarrier + warpgroup_, 128);
    if (sends) {
      ptx::tma_store(&maps_.d, buffer, column, row, batch);
      ptx::tma_store_commit();
    }
    buffer_ = buffer_ + 1 == kBuffers ? 0 : buffer_ + 1;
  }

  const GemmParams& params_;
  const TensorMaps& maps_;
  const uint32_t buffers_;
  const int warpgroup_;
  float alpha_;
  float bias_[kBlocks][2];
  int buffer_ = 0;  // the next buffer to be written
};

}  // namespace jax_tcgemm::sm90
