// A thread adds up four neighbouring columns, so that a warp reads and writes whole segments.

#include "sum_splits.h"

#include "common/dtype.cuh"
#include "epilogue/fused_epilogue.cuh"

namespace jax_tcgemm {
namespace {

constexpr int kThreads = 128;

template <typename Element>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(const __grid_constant__ GemmParams params, const float* partial, int splits) {
  using Epilogue = FusedEpilogue<Element, kVectorColumns>;
  const int column = (blockIdx.x * kThreads + threadIdx.x) * kVectorColumns;
  const int row = blockIdx.y;
  if (column >= params.n) return;
  const int64_t matrix = int64_t{params.m} * params.n;
  const float4* source =
      reinterpret_cast<const float4*>(partial + int64_t{row} * params.n + column);
  typename Epilogue::Vector sum[1] = {};
#pragma unroll 4
  for (int i = 0; i < splits; ++i) {
    const float4 part = source[i * (matrix / kVectorColumns)];
    sum[0][0] += part.x;
    sum[0][1] += part.y;
    sum[0][2] += part.z;
    sum[0][3] += part.w;
  }
  const Epilogue epilogue(params, 0, column);
  epilogue.finish(sum, row, 0);
}

}  // namespace

cudaError_t launch_sum_splits(const GemmParams& params, Algorithm algorithm, const float* partial,
                              int splits, cudaStream_t stream) {
  cudaLaunchConfig_t launch = {};
  const int per_block = kThreads * kVectorColumns;
  launch.gridDim = dim3((params.n + per_block - 1) / per_block, params.m);
  launch.blockDim = dim3(kThreads);
  launch.stream = stream;
  switch (algorithm) {
    case Algorithm::kBf16Bf16F32:
      return cudaLaunchKernelEx(&launch, sum_kernel<__nv_bfloat16>, params, partial, splits);
    case Algorithm::kTf32Tf32F32:
      return cudaLaunchKernelEx(&launch, sum_kernel<float>, params, partial, splits);
    default:
      return cudaLaunchKernelEx(&launch, sum_kernel<__half>, params, partial, splits);
  }
}

}  // namespace jax_tcgemm
