// Memory limits this pass, so it touches each matrix once, 16 bytes at a time.
//
// Roles: block (x, y): kBlockColumns columns of part y of the rows; a warp: every kWarps-th row of
//        them; a thread: kColumns neighbouring columns and their sums.
// Barriers: one __syncthreads(), when all warps have written their sums to shared memory.
// Timeline: [load kRows rows of both -> multiply, add up, store] ... -> add up the warps' sums. The
//        kernel for products over parts of k (sum_splits.h) then adds up the sums of the parts,
//        always in the same order.

#include "passes/activation_gradient.h"

#include "common/dtype.cuh"
#include "epilogue/activations.cuh"
#include "epilogue/vector_io.cuh"
#include "passes/sum_splits.h"

namespace jax_tcgemm {
namespace {

constexpr int kColumns = kGradientColumns;
constexpr int kBlockColumns = 32 * kColumns;
constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kRows = 2;  // that a thread has in flight

static_assert(kThreads == kBlockColumns, "a thread adds up one column of all warps");

using Columns = float[kColumns];

template <typename Element>
__device__ __forceinline__ void unpack_columns(Columns& value, const uint4& packed) {
  const uint32_t words[] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack<Element>(words[i]);
    value[2 * i] = pair.x;
    value[2 * i + 1] = pair.y;
  }
}

template <typename Element>
__device__ __forceinline__ uint4 pack_columns(const Columns& value) {
  return {pack<Element>(value[0], value[1]), pack<Element>(value[2], value[3]),
          pack<Element>(value[4], value[5]), pack<Element>(value[6], value[7])};
}

// The data that a thread reads and writes, in vectors of kColumns elements.
struct Strip {
  const uint4* cotangent;
  const uint4* z;
  uint4* d;
  int64_t stride;  // vectors, from one row to the next
  int64_t begin, end;
};

template <typename Element, ActivationFunctor Functor>
__device__ __forceinline__ void multiply(const Functor& functor, const Strip& at, Columns& sum) {
#pragma unroll 1
  for (int64_t first = at.begin + threadIdx.x / 32; first < at.end; first += kRows * kWarps) {
    uint4 packed_z[kRows];
    uint4 packed_g[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      // The load needs no condition, so it waits for none: the last row is loaded again.
      const int64_t row = min(first + i * kWarps, at.end - 1);
      packed_z[i] = at.z[row * at.stride];
      packed_g[i] = at.cotangent[row * at.stride];
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t row = first + i * kWarps;
      if (row >= at.end) break;
      Columns z, g;
      unpack_columns<Element>(z, packed_z[i]);
      unpack_columns<Element>(g, packed_g[i]);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        float slope;
        differentiate(functor, z[j], slope);
        g[j] *= slope;
        sum[j] += g[j];
      }
      at.d[row * at.stride] = pack_columns<Element>(g);
    }
  }
}

// Computes part blockIdx.y of the rows. `epilogue` is that of a product D that is multiplied by the
// activation's derivative at C (RoleOfC::kDerivative); no other field counts.
template <typename Element>
__global__ void __launch_bounds__(kThreads, 4)
    gradient_kernel(const __grid_constant__ EpilogueParams epilogue, const void* cotangent,
                    float* partial_sums, int64_t rows, int32_t n, int32_t parts) {
  __shared__ float sums[kWarps][kBlockColumns];  // (warps, columns of the block)
  const int column = blockIdx.x * kBlockColumns + threadIdx.x % 32 * kColumns;
  const int part = blockIdx.y;
  const int64_t vector = column / kColumns;
  const Strip at = {static_cast<const uint4*>(cotangent) + vector,
                    static_cast<const uint4*>(epilogue.c.data) + vector,
                    static_cast<uint4*>(epilogue.d) + vector,
                    n / kColumns,
                    part * rows / parts,
                    (part + 1) * rows / parts};
  Columns sum = {};
  if (column < n) {
    visit_activation(epilogue, [&]<ActivationFunctor Functor>(const Functor& functor) {
      multiply<Element>(functor, at, sum);
    });
  }
  if (partial_sums == nullptr) return;
#pragma unroll
  for (int j = 0; j < kColumns; ++j)
    sums[threadIdx.x / 32][threadIdx.x % 32 * kColumns + j] = sum[j];
  __syncthreads();
  float total = 0.f;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) total += sums[warp][threadIdx.x];
  const int own = blockIdx.x * kBlockColumns + threadIdx.x;
  if (own < n) partial_sums[int64_t{part} * n + own] = total;
}

template <typename Element>
cudaError_t launch_gradient(const ActivationGradient& problem, cudaStream_t stream) {
  EpilogueParams epilogue = {};
  epilogue.role_of_c = RoleOfC::kDerivative;
  epilogue.c.data = problem.z;
  epilogue.d = problem.d;
  epilogue.activation = problem.activation;
  for (int i = 0; i < kActivationParameters; ++i) {
    epilogue.activation_parameters[i] = problem.activation_parameters[i];
  }
  cudaLaunchConfig_t launch = {};
  launch.gridDim = dim3((problem.n + kBlockColumns - 1) / kBlockColumns, problem.parts);
  launch.blockDim = dim3(kThreads);
  launch.stream = stream;
  return cudaLaunchKernelEx(&launch, gradient_kernel<Element>, epilogue, problem.cotangent,
                            problem.partial_sums, problem.rows, problem.n, problem.parts);
}

cudaError_t launch_gradient(const ActivationGradient& problem, ElementType type,
                            cudaStream_t stream) {
  switch (type) {
#define JAX_TCGEMM_CASE(Type, kBytes, Device, ...)                              \
  case ElementType::Type:                                                       \
    if constexpr (kBytes == 2) return launch_gradient<Device>(problem, stream); \
    break;
    JAX_TCGEMM_BUILT_TYPES(JAX_TCGEMM_CASE)
#undef JAX_TCGEMM_CASE
    default:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_activation_gradient(const ActivationGradient& problem, ElementType type,
                                       cudaStream_t stream) {
  const cudaError_t error = launch_gradient(problem, type, stream);
  if (error != cudaSuccess || problem.partial_sums == nullptr) return error;
  GemmParams sums = {};
  sums.m = sums.batch = 1;
  sums.n = problem.n;
  sums.epilogue.alpha.value = 1.f;
  sums.epilogue.d = problem.sums;
  sums.epilogue.d_type = problem.sums_type;
  sums.epilogue.d_vectorizable = true;
  return launch_sum_splits(sums, type, problem.partial_sums, problem.parts, stream);
}

}  // namespace jax_tcgemm
