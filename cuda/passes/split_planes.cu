// Splits float32 operands into planes: see split_planes.h. A block takes one part of an operand
// after the other (split_part.cuh).

#include "passes/split_planes.h"

#include <cuda_bf16.h>
#include <stdint.h>

#include <algorithm>
#include <limits>

#include "common/ceil_div.h"
#include "common/fast_divisor.h"
#include "common/saturating.h"
#include "passes/split_part.cuh"

namespace jax_tcgemm {
namespace {

using namespace planes;

constexpr int64_t kLineBytes = 128;

// Biased exponents of an operand's least and largest number; 255 and 0 if all are zeros.
struct Exponents {
  uint8_t least = 255;
  uint8_t most = 0;
};
constexpr int kMaxBlocks = (kSplitStateBytes - kLineBytes) / (2 * sizeof(Exponents));

// The work of a launch: the parts of A, then those of B.
struct SplitLaunch {
  SplitProblem problem[2];
  FastDivisor parts_per_row[2];
  FastDivisor parts_per_matrix[2];
  int32_t parts_of_a, parts;
  int32_t blocks;
  int32_t k;
  PlaneScale* scale;
  Exponents (*found)[2];  // for each block
};

// Splits a part, and notes the magnitudes of its numbers.
__device__ __forceinline__ void split_part(const SplitLaunch& launch, int32_t part,
                                           const Scales (&scales)[2], Magnitudes (&found)[2]) {
  const int which = part >= launch.parts_of_a;
  const SplitProblem& p = launch.problem[which];
  const int32_t of_operand = part - which * launch.parts_of_a;
  int32_t batch = launch.parts_per_matrix[which].divide(of_operand);
  const int32_t rest = of_operand - batch * launch.parts_per_matrix[which].divisor;
  const int32_t rows = launch.parts_per_row[which].divide(rest);
  const int32_t columns = rest - rows * launch.parts_per_row[which].divisor;
  Matrix matrix = {static_cast<const float*>(p.in.data), static_cast<__nv_bfloat16*>(p.out)};
  for (int i = p.batch_rank - 1; i >= 0; --i) {
    const int32_t outer = batch / p.batch_shape[i];
    const int64_t index = batch - outer * p.batch_shape[i];
    matrix.in += index * p.in.batch.stride[i];
    matrix.out += index * p.out_batch.stride[i];
    batch = outer;
  }
  Magnitudes magnitudes;
  if (p.major == Major::kK) {
    split_k_major(p, matrix, rows, columns, scales[which], &magnitudes);
  } else {
    split_mn_major(p, matrix, rows, columns, scales[which], &magnitudes);
  }
  // An index in place of these conditions would need local memory.
  found[0].merge(magnitudes, which == 0);
  found[1].merge(magnitudes, which == 1);
}

// Finds the least and the largest number of all threads.
__device__ __forceinline__ void reduce(uint32_t* least, uint32_t* most) {
  __shared__ uint32_t of_warp[kThreads / 32][2];
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    *least = min(*least, __shfl_xor_sync(0xffffffff, *least, lanes));
    *most = max(*most, __shfl_xor_sync(0xffffffff, *most, lanes));
  }
  __syncthreads();  // threads may still read of_warp
  if (threadIdx.x % 32 == 0) {
    of_warp[threadIdx.x / 32][0] = *least;
    of_warp[threadIdx.x / 32][1] = *most;
  }
  __syncthreads();
  for (const auto& [other_least, other_most] : of_warp) {
    *least = min(*least, other_least);
    *most = max(*most, other_most);
  }
}

// Splits without scales, and notes the exponents of the numbers.
__global__ void __launch_bounds__(kThreads)
    split_kernel(const __grid_constant__ SplitLaunch launch) {
  const Scales scales[2] = {{1.f, 1.f}, {1.f, 1.f}};
  Magnitudes magnitudes[2];
#pragma unroll 1
  for (int32_t part = blockIdx.x; part < launch.parts; part += gridDim.x) {
    split_part(launch, part, scales, magnitudes);
  }
  for (int i = 0; i < 2; ++i) {
    reduce(&magnitudes[i].least, &magnitudes[i].most);
    if (threadIdx.x != 0) continue;
    const uint32_t least = magnitudes[i].least;
    launch.found[blockIdx.x][i] = {
        static_cast<uint8_t>(least == 0xffffffff ? 255 : (least + 1) >> 23),
        static_cast<uint8_t>(magnitudes[i].most >> 23)};
  }
}

// An operand's numbers, except zeros, are at least 2^least and less than 2^most in magnitude. If
// all are zeros, both are 0.
struct Bounds {
  int least, most;

  __device__ __forceinline__ Bounds(uint32_t biased_least, uint32_t biased_most) {
    const bool any = biased_least != 255 || biased_most != 0;  // not only zeros
    least = !any ? 0 : biased_least == 0 ? -149 : static_cast<int>(biased_least) - 127;
    most = any ? static_cast<int>(biased_most) - 126 : 0;
  }
};

// Returns the scales with which neither the planes nor their products lose bits: each operand is
// multiplied by a power of two. If this takes the sum beyond float32's range, or if the sum is
// beyond it anyway, planes are scaled instead.
__device__ __forceinline__ PlaneScale scale_for(const Bounds& a, const Bounds& b, int32_t count,
                                                int32_t k) {
  constexpr int kLeast = -109;         // the last bit of such a number is 2^-132
  constexpr int kLeastProduct = -120;  // of order 0
  constexpr int kMost = 126;
  int shift_a = max(0, kLeast - a.least);
  int shift_b = max(0, kLeast - b.least);
  const int missing = max(0, kLeastProduct - (a.least + shift_a + b.least + shift_b));
  shift_a += missing / 2;
  shift_b += missing - missing / 2;
  const int bits_of_k = 32 - __clz(k);
  const bool fits = a.most + shift_a <= kMost && b.most + shift_b <= kMost &&
                    a.most + shift_a + b.most + shift_b + bits_of_k <= kMost;
  if (fits) return {0, {shift_a, shift_b}};
  // Two planes may be further apart if no sum over products of order 1 can be beyond float32's
  // range then. So they lose as little of a denormal as three planes.
  const bool small = a.most <= 50 && b.most <= 50;
  return {count == 2 && small ? 2 * kPlaneBits : kPlaneBits, {0, 0}};
}

__device__ __forceinline__ float power_of_two(int exponent) {
  return __int_as_float((127 + exponent) << 23);
}

// Splits once more if the numbers need scales.
__global__ void __launch_bounds__(kThreads)
    scale_kernel(const __grid_constant__ SplitLaunch launch) {
  uint32_t least[2] = {255, 255};
  uint32_t most[2] = {};
  for (int32_t i = threadIdx.x; i < launch.blocks; i += kThreads) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const Exponents found = launch.found[i][j];
      least[j] = min(least[j], uint32_t{found.least});
      most[j] = max(most[j], uint32_t{found.most});
    }
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) reduce(&least[j], &most[j]);
  const PlaneScale scale =
      scale_for({least[0], most[0]}, {least[1], most[1]}, launch.problem[0].count, launch.k);
  if (blockIdx.x == 0 && threadIdx.x == 0) *launch.scale = scale;
  if (scale.bits == 0 && scale.shift[0] == 0 && scale.shift[1] == 0) return;
  const float of_planes = power_of_two(scale.bits);
  const Scales scales[2] = {{power_of_two(scale.shift[0]), of_planes},
                            {power_of_two(scale.shift[1]), of_planes}};
  Magnitudes magnitudes[2];  // not used: they are known
#pragma unroll 1
  for (int32_t part = blockIdx.x; part < launch.parts; part += gridDim.x) {
    split_part(launch, part, scales, magnitudes);
  }
}

}  // namespace

int64_t plan_split(SplitProblem* problem) {
  SplitProblem& p = *problem;
  p.out_ld = int64_t{p.count} * p.plane_k;
  const int64_t rows = p.major == Major::kMn ? p.columns : p.pairs ? 2 * p.rows : p.rows;
  int64_t elements = mul_sat(p.out_ld, rows);
  for (int i = p.batch_rank - 1; i >= 0; --i) {
    const bool broadcast = p.in.batch.stride[i] == 0;
    if (broadcast) p.batch_shape[i] = 1;
    p.out_batch.stride[i] = broadcast ? 0 : elements;
    elements = mul_sat(elements, p.batch_shape[i]);
  }
  return add_sat(mul_sat(elements, 2), kLineBytes - 1) / kLineBytes * kLineBytes;
}

cudaError_t launch_splits(const SplitProblem (&problems)[2], void* state, cudaStream_t stream) {
  SplitLaunch launch = {};
  launch.scale = static_cast<PlaneScale*>(state);
  launch.found = reinterpret_cast<Exponents(*)[2]>(static_cast<char*>(state) + kLineBytes);
  launch.k = problems[0].plane_k;
  int64_t parts = 0;
  for (int i = 0; i < 2; ++i) {
    const SplitProblem& p = launch.problem[i] = problems[i];
    const bool k_major = p.major == Major::kK;
    const int64_t per_row = k_major ? ceil_div(p.plane_k, kColumns) : ceil_div(p.columns, kSide);
    const int64_t per_matrix = per_row * (k_major ? ceil_div(p.rows, kRows) : p.plane_k / kSide);
    int64_t batch = 1;
    for (int j = 0; j < p.batch_rank; ++j) batch *= p.batch_shape[j];
    // A block counts parts up to one step of the grid beyond the last one.
    if (parts + per_matrix * batch > std::numeric_limits<int32_t>::max() - kMaxBlocks) {
      return cudaErrorInvalidConfiguration;
    }
    launch.parts_per_row[i] = make_fast_divisor(static_cast<int32_t>(per_row));
    launch.parts_per_matrix[i] = make_fast_divisor(static_cast<int32_t>(per_matrix));
    parts += per_matrix * batch;
    if (i == 0) launch.parts_of_a = static_cast<int32_t>(parts);
  }
  launch.parts = static_cast<int32_t>(parts);
  launch.blocks = std::min(launch.parts, kMaxBlocks);
  cudaLaunchConfig_t grid = {};
  grid.gridDim = dim3(static_cast<unsigned>(launch.blocks));
  grid.blockDim = dim3(kThreads);
  grid.stream = stream;
  const cudaError_t split = cudaLaunchKernelEx(&grid, split_kernel, launch);
  if (split != cudaSuccess) return split;
  constexpr unsigned kFew = 512;  // these blocks mostly have nothing to do
  grid.gridDim.x = std::min(grid.gridDim.x, kFew);
  return cudaLaunchKernelEx(&grid, scale_kernel, launch);
}

}  // namespace jax_tcgemm
