// New on Hopper: TMA copies boxes of a tensor, and wgmma multiplies from shared memory.
//
// One thread requests a swizzled box of 128 bytes by 128 rows with one instruction: no addresses,
// no registers. Four warps together issue wgmma, 64 x 128 of D by 32 bytes of k. Its operands are
// descriptors of shared memory. Both units run asynchronously. mbarriers tell when a stage is full
// (all its bytes have arrived) and when it is empty (8 warps have read it).
//
// Roles: one thread of warpgroup 0 is the producer. Warpgroups 1 and 2 compute 64 rows of the tile
// each. wgmma takes float32 operands only in rows of k, so B is passed as (n, k).
//
// Ceiling: one tile a block. Nothing multiplies while the block starts and while it stores D.

#include "ladder.h"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "tensor_map.h"
#include "vectors.cuh"

namespace ladder {
namespace {

using jax_tcgemm::Algorithm;
using jax_tcgemm::Major;
namespace ptx = jax_tcgemm::ptx;

constexpr int kTile = 128;
constexpr int kStages = 6;
constexpr int kOperandBytes = kTile * 128;
constexpr int kStageBytes = 2 * kOperandBytes;
constexpr int kSharedBytes = kStages * kStageBytes + 2 * kStages * 8;
constexpr int kThreads = 3 * 128;
constexpr int kConsumerWarps = 8;

template <typename T>
constexpr int kTileK = 128 / sizeof(T);

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
struct Ring {
  uint32_t base, stage = 0, phase = 0;
  __device__ uint32_t a() const { return base + stage * kStageBytes; }
  __device__ uint32_t b() const { return a() + kOperandBytes; }
  __device__ uint32_t full() const { return base + kStages * kStageBytes + stage * 8; }
  __device__ uint32_t empty(uint32_t i) const { return base + kStages * (kStageBytes + 8) + i * 8; }
  __device__ void advance() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

template <typename T>
__device__ void produce(Ring at, const CUtensorMap& a, const CUtensorMap& b, int k) {
  const int row = blockIdx.y * kTile, column = blockIdx.x * kTile;
  for (int first = 0; first < k; first += kTileK<T>, at.advance()) {
    ptx::mbarrier_wait(at.empty(at.stage), at.phase ^ 1);
    ptx::mbarrier_arrive_expect(at.full(), kStageBytes);
    ptx::tma_load(at.a(), &a, at.full(), first, row, 0);
    if constexpr (sizeof(T) == 4) {
      ptx::tma_load(at.b(), &b, at.full(), first, column, 0);
    } else {  // in two boxes of 64 columns
      ptx::tma_load(at.b(), &b, at.full(), column, first, 0);
      ptx::tma_load(at.b() + kOperandBytes / 2, &b, at.full(), column + 64, first, 0);
    }
  }
}

template <typename T>
__device__ void multiply(float (&sum)[kTile / 2], Ring at, int group, int k) {
  constexpr Algorithm kAlgorithm =
      sizeof(T) == 2 ? Algorithm::kBf16Bf16F32 : Algorithm::kTf32Tf32F32;
  constexpr Major kMajorB = sizeof(T) == 2 ? Major::kMn : Major::kK;
  constexpr int kStepB = sizeof(T) == 2 ? 16 * 128 : 32;  // 16 rows of k, or 32 bytes of k
  uint32_t before = 0;
  for (int first = 0; first < k; first += kTileK<T>, at.advance()) {
    ptx::mbarrier_wait(at.full(), at.phase);
    const uint64_t a = ptx::matrix_descriptor(at.a() + group * kOperandBytes / 2, 16);
    const uint64_t b = ptx::matrix_descriptor(at.b(), sizeof(T) == 2 ? kOperandBytes / 2 : 16);
    ptx::wgmma_fence_registers(sum);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      ptx::Wgmma<kAlgorithm, kTile>::template from_shared<Major::kK, kMajorB>(
          sum, ptx::advance(a, step * 32), ptx::advance(b, step * kStepB), first > 0 || step > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_fence_registers(sum);
    ptx::wgmma_wait<1>();  // this stage is being multiplied, the previous one is free
    if (first > 0 && threadIdx.x % 32 == 0) ptx::mbarrier_arrive(at.empty(before));
    before = at.stage;
  }
  ptx::wgmma_wait<0>();
  ptx::wgmma_fence_registers(sum);
}
#endif

template <typename T>
__global__ void __launch_bounds__(kThreads)
    kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
           Product<T> p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char shared[];
  Ring ring = {ptx::shared_address(shared)};
  if (threadIdx.x == 0) {
    for (Ring at = ring; at.phase == 0; at.advance()) {
      ptx::mbarrier_init(at.full(), 1);
      ptx::mbarrier_init(at.empty(at.stage), kConsumerWarps);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    if (threadIdx.x == 0) produce<T>(ring, a, b, p.k);
    return;
  }
  float sum[kTile / 2];
  const int group = threadIdx.x / 128 - 1, lane = threadIdx.x % 32;
  multiply<T>(sum, ring, group, p.k);
  const int row = blockIdx.y * kTile + group * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
  T* d = p.d + size_t(row) * p.n + blockIdx.x * kTile + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < kTile / 2; i += 4) {
    write_2(d + i * 2, sum[i], sum[i + 1]);
    write_2(d + size_t(8) * p.n + i * 2, sum[i + 2], sum[i + 3]);
  }
#endif
}

}  // namespace

template <typename T>
cudaError_t tma_wgmma(const Product<T>& p) {
  CUtensorMap a, b;
  cudaError_t error = describe(&a, p.a, p.m, p.k, kTile);
  if (error == cudaSuccess) {
    error = sizeof(T) == 4 ? describe(&b, p.b, p.n, p.k, kTile)
                           : describe(&b, p.b, p.k, p.n, kTileK<T>);
  }
  if (error == cudaSuccess) {
    error =
        cudaFuncSetAttribute(kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  }
  if (error != cudaSuccess) return error;
  kernel<<<dim3(p.n / kTile, p.m / kTile), kThreads, kSharedBytes, p.stream>>>(a, b, p);
  return cudaGetLastError();
}

LADDER_INSTANTIATE(tma_wgmma)

}  // namespace ladder
