// A thread adds up four neighbouring columns, so that a warp reads and writes whole segments. The
// kernel takes a few microseconds, so many loads must be in flight and little code may be fetched:
// a plain D has its own kernel.

#include "passes/sum_splits.h"

#include "common/dtype.cuh"
#include "epilogue/fused_epilogue.cuh"
#include "epilogue/vector_io.cuh"
#include "epilogue/work.h"

namespace jax_tcgemm {
namespace {

constexpr int kThreads = 128;
constexpr int kMostTerms = 8;  // terms that a thread has in flight
constexpr int kManyParts = 4;

using Sum = Vector<kVectorColumns>;

__device__ __forceinline__ void add(Sum& sum, const float4& term) {
  sum[0] += term.x;
  sum[1] += term.y;
  sum[2] += term.z;
  sum[3] += term.w;
}

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
  Sum sum[1] = {};
#pragma unroll 4
  for (int i = 0; i < splits; ++i) add(sum[0], source[i * (matrix / kVectorColumns)]);
  const Epilogue epilogue(params, 0, column);
  epilogue.finish(sum, row, 0);
}

// D and the products are dense, so the kernel counts `vectors` of four elements without rows. Lanes
// that are 32 / kParts apart each add up every kParts-th product. A load without a condition takes
// half the time of a conditional one, so lanes without a product load one of the others.
template <typename Out, int kTerms, int kParts>
__global__ void __launch_bounds__(kThreads)
    plain_sum_kernel(const float4* partial, Out* d, int vectors, int splits) {
  constexpr int kColumns = 32 / kParts;  // vectors of a warp
  const int part = threadIdx.x % 32 / kColumns;
  const int warp = (blockIdx.x * kThreads + threadIdx.x) / 32;
  const int at = warp * kColumns + threadIdx.x % kColumns;
  const float4* source = partial + min(at, vectors - 1);
  Sum sum = {};
  for (int first = part; first < splits; first += kParts * kTerms) {
    float4 term[kTerms];
#pragma unroll
    for (int i = 0; i < kTerms; ++i) {
      const int split = min(first + i * kParts, splits - 1);
      term[i] = __ldcg(source + int64_t{split} * vectors);
    }
#pragma unroll
    for (int i = 0; i < kTerms; ++i) {
      if (first + i * kParts < splits) add(sum, term[i]);
    }
  }
#pragma unroll
  for (int distance = kColumns; distance < 32; distance *= 2) {
#pragma unroll
    for (float& value : sum) value += __shfl_xor_sync(0xffffffff, value, distance);
  }
  if (part > 0 || at >= vectors) return;
  constexpr bool kWhole = true;
  store_vector<Out, kVectorColumns>(d, kTypeOf<Out>, kWhole, int64_t{at} * kVectorColumns, sum,
                                    kVectorColumns);
}

template <typename Out, int kTerms, int kParts = 1>
cudaError_t launch_plain_sum(const GemmParams& params, const float* partial, int splits,
                             cudaStream_t stream) {
  const int vectors = static_cast<int>(int64_t{params.m} * params.n / kVectorColumns);
  const int per_block = kThreads / kParts;
  cudaLaunchConfig_t launch = {};
  launch.gridDim = dim3((vectors + per_block - 1) / per_block);
  launch.blockDim = dim3(kThreads);
  launch.stream = stream;
  return cudaLaunchKernelEx(&launch, plain_sum_kernel<Out, kTerms, kParts>,
                            reinterpret_cast<const float4*>(partial),
                            static_cast<Out*>(params.epilogue.d), vectors, splits);
}

template <typename Out>
cudaError_t launch_plain_sum(const GemmParams& params, const float* partial, int splits,
                             cudaStream_t stream) {
  if (splits <= 2) return launch_plain_sum<Out, 2>(params, partial, splits, stream);
  if (splits <= 4) return launch_plain_sum<Out, 4>(params, partial, splits, stream);
  if (splits <= kMostTerms) {
    return launch_plain_sum<Out, kMostTerms>(params, partial, splits, stream);
  }
  return launch_plain_sum<Out, kMostTerms, kManyParts>(params, partial, splits, stream);
}

template <typename Element>
cudaError_t launch_sum(const GemmParams& params, const float* partial, int splits,
                       cudaStream_t stream) {
  if (is_plain(params.epilogue) && params.epilogue.d_vectorizable) {
    return params.epilogue.d_type == ElementType::kF32
               ? launch_plain_sum<float>(params, partial, splits, stream)
               : launch_plain_sum<Element>(params, partial, splits, stream);
  }
  cudaLaunchConfig_t launch = {};
  const int per_block = kThreads * kVectorColumns;
  launch.gridDim = dim3((params.n + per_block - 1) / per_block, params.m);
  launch.blockDim = dim3(kThreads);
  launch.stream = stream;
  return cudaLaunchKernelEx(&launch, sum_kernel<Element>, params, partial, splits);
}

}  // namespace

cudaError_t launch_sum_splits(const GemmParams& params, ElementType type, const float* partial,
                              int splits, cudaStream_t stream) {
  switch (type) {
#define JAX_TCGEMM_CASE(Type, ...) \
  case ElementType::Type:          \
    return launch_sum<DeviceType<ElementType::Type>::Element>(params, partial, splits, stream);
    JAX_TCGEMM_BUILT_TYPES(JAX_TCGEMM_CASE)
#undef JAX_TCGEMM_CASE
    default:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace jax_tcgemm
