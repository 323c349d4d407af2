// New: cp.async, and a ring of stages.
//
// Copies go from L2 to shared memory past the registers, and their thread goes on meanwhile. Two
// stages are on their way while a third is multiplied, so that a copy has two stages' time, and one
// __syncthreads a stage does for both: when all warps are past it, the stage that was multiplied
// before it is free. A thread's copies are counted in groups: one for each stage, some empty. With
// three stages and 128 registers two blocks fit on an SM: one multiplies where the other waits.
//
// Ceiling: mma.sync. On an H100 it reaches some 60 % of what the tensor cores can do.

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
    jax_tcgemm::ptx::cp_async_wait_group<kStages - 2>();  // of this thread; all others', below
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
