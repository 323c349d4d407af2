// New: tensor cores. A warp multiplies 16 x 8 of D by 32 bytes of k with one instruction.
//
// mma.sync takes its operands from the registers of 32 lanes in a fixed pattern. ldmatrix reads
// four 8 x 8 matrices of 16-bit elements from shared memory in that pattern, transposed if needed.
// Shared memory now holds the elements in their own type, so bfloat16 takes half the bytes. float32
// is rounded to TF32, 11 bits, which tensor cores take. (warp_tile.cuh has the tile of a block and
// of a warp.)
//
// Ceiling: the path from L2 through registers. The loads occupy 64 more registers, and a block
// waits twice for all its warps, because there is one buffer.

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
