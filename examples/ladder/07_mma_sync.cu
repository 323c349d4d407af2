// New: tensor cores. A warp multiplies 16 x 8 of D by 32 bytes of k with one instruction.
//
// mma.sync wants its operands in registers of 32 lanes in a pattern of its own; ldmatrix reads four
// 8 x 8 matrices of 16-bit elements from shared memory in just that pattern, transposed if need be.
// Elements stay as they are in shared memory now, bfloat16 in half the bytes. float32 is rounded to
// TF32, 11 bits: what tensor cores take of it. (warp_tile.cuh: the tile of a block and of a warp.)
//
// Ceiling: the way from L2 through registers. 64 more of them wait for it, and a block waits twice
// for all its warps, since there is one buffer.

#include "warp_tile.cuh"

namespace ladder {
namespace {

template <typename T>
__global__ void __launch_bounds__(kThreads) kernel(Product<T> p) {
  __shared__ __align__(128) char stage[kStageBytes];
  uint4 next[2 * kChunks];
  const auto load = [&](int first) {
    Stage<T>::for_each_chunk(p, first, [&](int i, int, const T* from) {
      next[i] = *reinterpret_cast<const uint4*>(from);
    });
  };
  WarpTile<T> tile;
  load(0);
  for (int first = 0; first < p.k; first += Stage<T>::kTileK) {
    Stage<T>::for_each_chunk(p, first, [&](int i, int offset, const T*) {
      *reinterpret_cast<uint4*>(stage + offset) = next[i];
    });
    __syncthreads();
    if (first + Stage<T>::kTileK < p.k) load(first + Stage<T>::kTileK);
    tile.multiply(jax_tcgemm::ptx::shared_address(stage));
    __syncthreads();
  }
  tile.store(p);
}

}  // namespace

template <typename T>
cudaError_t mma_sync(const Product<T>& p) {
  kernel<<<dim3(p.n / kTile, p.m / kTile), kThreads, 0, p.stream>>>(p);
  return cudaGetLastError();
}

LADDER_INSTANTIATE(mma_sync)

}  // namespace ladder
