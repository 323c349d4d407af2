// Splits float32 operands into planes: see split_planes.h. A thread reads 8 elements and writes 16
// bytes of each plane.

#include "passes/split_planes.h"

#include <cuda_bf16.h>
#include <stdint.h>

#include <algorithm>
#include <limits>

#include "common/ceil_div.h"
#include "common/dtype.cuh"
#include "common/fast_divisor.h"

namespace jax_tcgemm {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsPerBlock = 4;
constexpr int kWidth = 8;  // elements of a thread in a row
constexpr int64_t kLineBytes = 128;

// Blocks of kThreads * kWidth columns and kRowsPerBlock rows, those of B behind those of A.
struct SplitLaunch {
  SplitProblem problem[2];
  int32_t out_rows[2], out_columns[2];  // of one plane
  FastDivisor blocks_per_row[2];
  FastDivisor blocks_per_matrix[2];
  int32_t first_blocks;
};

__device__ __forceinline__ void read(float (&value)[kWidth], const float* from, int count) {
  if (count >= kWidth && reinterpret_cast<uint64_t>(from) % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kWidth; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + i);
      value[i] = four.x, value[i + 1] = four.y, value[i + 2] = four.z, value[i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) value[i] = i < count ? from[i] : 0.f;
  }
}

// The nearest bfloat16; the largest or the smallest one, not infinity or zero, for what is neither,
// so that products with infinity are what they should be.
__device__ __forceinline__ float first_plane(float value) {
  const float nearest = __bfloat162float(__float2bfloat16_rn(value));
  constexpr float kLargest = 0x1.fep127f;
  constexpr float kSmallest = 0x1p-133f;
  if (isinf(nearest) && !isinf(value)) return copysignf(kLargest, value);
  return nearest == 0.f && value != 0.f ? copysignf(kSmallest, value) : nearest;
}

__device__ __forceinline__ void split_row(const SplitProblem& p, int64_t in, int64_t out,
                                          int32_t row, int32_t column) {
  float rest[kWidth] = {};
  if (row < p.rows) {
    read(rest, static_cast<const float*>(p.in.data) + in + row * p.in.ld + column,
         p.columns - column);
  }
  const int64_t plane = p.major == Major::kK ? p.plane_k : p.plane_k * p.out_ld;
  __nv_bfloat16* to = static_cast<__nv_bfloat16*>(p.out) + out + row * p.out_ld + column;
#pragma unroll 1
  for (int i = 0; i < p.count; ++i, to += plane) {
    uint32_t word[kWidth / 2];
#pragma unroll
    for (int j = 0; j < kWidth; j += 2) {
      word[j / 2] = i == 0 ? pack<__nv_bfloat16>(first_plane(rest[j]), first_plane(rest[j + 1]))
                           : pack<__nv_bfloat16>(rest[j], rest[j + 1]);
      const float2 plane = unpack<__nv_bfloat16>(word[j / 2]);
      // At most half of the number, so that no sum is beyond float32's range that D is not.
      rest[j] = (rest[j] - plane.x) * 0x1p7f;
      rest[j + 1] = (rest[j + 1] - plane.y) * 0x1p7f;
    }
    *reinterpret_cast<uint4*>(to) = {word[0], word[1], word[2], word[3]};
  }
}

__global__ void __launch_bounds__(kThreads)
    split_kernel(const __grid_constant__ SplitLaunch launch) {
  const int32_t block = blockIdx.x;
  const int which = block >= launch.first_blocks;
  const SplitProblem& p = launch.problem[which];
  const int32_t of_operand = block - which * launch.first_blocks;
  int32_t batch = launch.blocks_per_matrix[which].divide(of_operand);
  const int32_t rest = of_operand - batch * launch.blocks_per_matrix[which].divisor;
  const int32_t rows = launch.blocks_per_row[which].divide(rest);
  const int32_t columns = rest - rows * launch.blocks_per_row[which].divisor;
  const int32_t column = (columns * kThreads + threadIdx.x) * kWidth;
  if (column >= launch.out_columns[which]) return;
  int64_t in = 0;
  int64_t out = 0;
  for (int i = p.batch_rank - 1; i >= 0; --i) {
    const int32_t outer = batch / p.batch_shape[i];
    const int64_t index = batch - outer * p.batch_shape[i];
    in += index * p.in.batch.stride[i];
    out += index * p.out_batch.stride[i];
    batch = outer;
  }
#pragma unroll
  for (int i = 0; i < kRowsPerBlock; ++i) {
    const int32_t row = rows * kRowsPerBlock + i;
    if (row < launch.out_rows[which]) split_row(p, in, out, row, column);
  }
}

}  // namespace

int64_t plan_split(SplitProblem* problem) {
  SplitProblem& p = *problem;
  constexpr int64_t kLineElements = kLineBytes / 2;
  const bool k_major = p.major == Major::kK;
  p.out_ld = k_major ? int64_t{p.count} * p.plane_k
                     : ceil_div(int64_t{p.columns}, kLineElements) * kLineElements;
  int64_t elements = (k_major ? int64_t{p.rows} : int64_t{p.count} * p.plane_k) * p.out_ld;
  for (int i = p.batch_rank - 1; i >= 0; --i) {
    const bool broadcast = p.in.batch.stride[i] == 0;
    if (broadcast) p.batch_shape[i] = 1;
    p.out_batch.stride[i] = broadcast ? 0 : elements;
    elements *= p.batch_shape[i];
  }
  return ceil_div(2 * elements, kLineBytes) * kLineBytes;
}

cudaError_t launch_splits(const SplitProblem (&problems)[2], cudaStream_t stream) {
  SplitLaunch launch = {};
  int64_t blocks = 0;
  for (int i = 0; i < 2; ++i) {
    const SplitProblem& p = launch.problem[i] = problems[i];
    const bool k_major = p.major == Major::kK;
    launch.out_rows[i] = k_major ? p.rows : p.plane_k;
    launch.out_columns[i] = k_major ? p.plane_k : p.columns;
    const int64_t per_row = ceil_div(launch.out_columns[i], kThreads * kWidth);
    const int64_t per_matrix = per_row * ceil_div(launch.out_rows[i], kRowsPerBlock);
    int64_t batch = 1;
    for (int j = 0; j < p.batch_rank; ++j) batch *= p.batch_shape[j];
    if (blocks + per_matrix * batch > std::numeric_limits<int32_t>::max()) {
      return cudaErrorInvalidConfiguration;
    }
    launch.blocks_per_row[i] = make_fast_divisor(static_cast<int32_t>(per_row));
    launch.blocks_per_matrix[i] = make_fast_divisor(static_cast<int32_t>(per_matrix));
    blocks += per_matrix * batch;
    if (i == 0) launch.first_blocks = static_cast<int32_t>(blocks);
  }
  cudaLaunchConfig_t grid = {};
  grid.gridDim = dim3(static_cast<unsigned>(blocks));
  grid.blockDim = dim3(kThreads);
  grid.stream = stream;
  return cudaLaunchKernelEx(&grid, split_kernel, launch);
}

}  // namespace jax_tcgemm
