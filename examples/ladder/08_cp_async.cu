// New: cp.async, and a ring of stages.
//
// Copies go from L2 to shared memory without registers, and the thread continues meanwhile. Two
// stages are in flight while a third is multiplied, so that a copy has the time of two stages. One
// __syncthreads a stage suffices: when all warps have passed it, the previously multiplied stage is
// free. A thread counts its copies in groups, one for each stage, some of them empty. With three
// stages and 128 registers two blocks fit on an SM: one multiplies while the other waits.
//
// Ceiling: mma.sync. On an H100 it reaches about 60 % of the tensor cores' peak.

#include "ptx/cp_async.cuh"
#include "warp_tile.cuh"

namespace ladder {
namespace {

constexpr int kStages = 3;

template <typename T>
__global__ void __launch_bounds__(kThreads, 2) kernel(Product<T> p) {
  extern __shared__ __align__(128) char ring[];
  const uint32_t stages = jax_tcgemm::ptx::shared_address(ring);
  const int count = p.k / Stage<T>::kTileK;
  const auto begin = [&](int i) {
    if (i < count) {
      const uint32_t stage = stages + i % kStages * kStageBytes;
      Stage<T>::for_each_chunk(p, i * Stage<T>::kTileK, [&](int, int offset, const T* from) {
        jax_tcgemm::ptx::cp_async_16(stage + offset, from, true);
      });
    }
    jax_tcgemm::ptx::cp_async_commit_group();
  };
  WarpTile<T> tile;
  for (int i = 0; i < kStages - 1; ++i) begin(i);
  for (int i = 0; i < count; ++i) {
    // of this thread; __syncthreads covers the others
    jax_tcgemm::ptx::cp_async_wait_group<kStages - 2>();
    __syncthreads();
    begin(i + kStages - 1);
    tile.multiply(stages + i % kStages * kStageBytes);
  }
  tile.store(p);
}

}  // namespace

template <typename T>
cudaError_t cp_async(const Product<T>& p) {
  constexpr int kBytes = kStages * kStageBytes;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  kernel<<<dim3(p.n / kTile, p.m / kTile), kThreads, kBytes, p.stream>>>(p);
  return cudaGetLastError();
}

LADDER_INSTANTIATE(cp_async)

}  // namespace ladder
