// A thread adds up 16 bytes of each part. All its loads are in flight before the first addition.

#include "passes/sum_parts.h"

#include "common/dtype.cuh"
#include "shared_limits.h"

namespace jax_tcgemm {
namespace {

constexpr int kThreads = 256;

template <typename Element>
struct Sums {
  static constexpr int kCount = kSumPartsBytes / sizeof(Element);
  float value[kCount] = {};

  __device__ __forceinline__ void add(const uint4& part) {
    const uint32_t words[] = {part.x, part.y, part.z, part.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(Element) == 4) {
        value[i] += __uint_as_float(words[i]);
      } else {
        const float2 pair = unpack<Element>(words[i]);
        value[2 * i] += pair.x;
        value[2 * i + 1] += pair.y;
      }
    }
  }

  __device__ __forceinline__ uint4 rounded() const {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(Element) == 4) {
        words[i] = __float_as_uint(value[i]);
      } else {
        words[i] = pack<Element>(value[2 * i], value[2 * i + 1]);
      }
    }
    return {words[0], words[1], words[2], words[3]};
  }
};

template <typename Element, int kParts>
__global__ void __launch_bounds__(kThreads)
    sum_parts_kernel(const uint4* parts, int count, int64_t vectors, uint4* d) {
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= vectors) return;
  uint4 part[kParts];
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    if (i < count) part[i] = __ldcs(parts + i * vectors + at);
  }
  Sums<Element> sums;
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    if (i < count) sums.add(part[i]);
  }
  d[at] = sums.rounded();
}

template <typename Element>
cudaError_t launch(const void* parts, int count, int64_t elements, void* d, cudaStream_t stream) {
  const int64_t vectors = elements * static_cast<int64_t>(sizeof(Element)) / kSumPartsBytes;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>((vectors + kThreads - 1) / kThreads));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  const auto kernel = count <= 2   ? sum_parts_kernel<Element, 2>
                      : count <= 4 ? sum_parts_kernel<Element, 4>
                                   : sum_parts_kernel<Element, kMostPeers>;
  return cudaLaunchKernelEx(&config, kernel, static_cast<const uint4*>(parts), count, vectors,
                            static_cast<uint4*>(d));
}

}  // namespace

cudaError_t launch_sum_parts(const void* parts, int count, int64_t elements, ElementType type,
                             void* d, cudaStream_t stream) {
  if (count > kMostPeers) return cudaErrorInvalidValue;
  switch (type) {
#define JAX_TCGEMM_CASE(Type, ...) \
  case ElementType::Type:          \
    return launch<DeviceType<ElementType::Type>::Element>(parts, count, elements, d, stream);
    JAX_TCGEMM_BUILT_TYPES(JAX_TCGEMM_CASE)
#undef JAX_TCGEMM_CASE
    default:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace jax_tcgemm
