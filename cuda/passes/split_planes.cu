// Splits float32 operands into planes: see split_planes.h. A thread splits 8 elements along k and
// writes 16 bytes of each plane; those of an mn-major operand lie in shared memory before. A block
// takes one part of an operand after the other.

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
constexpr int kWidth = 8;  // elements of a thread along k
// A part of a k-major operand, and of an mn-major one.
constexpr int kRows = 4;
constexpr int kColumns = kThreads * kWidth;
constexpr int kSide = 64;
constexpr int kPitch = kSide + 1;
constexpr int64_t kLineBytes = 128;
constexpr int kMaxBlocks = kSplitStateBytes - kLineBytes;  // each has a byte

// What there is among the elements of A, and four bits above among those of B.
constexpr uint32_t kTiny = 1;         // below 2^-60, but no zero
constexpr uint32_t kVanishing = 2;    // below 2^-100: plane 2 would lose bits
constexpr uint32_t kLarge = 4;        // 2^50 and more
constexpr uint32_t kOverflowing = 8;  // 2^100 and more, infinities and NaN
constexpr int kBitsOfB = 4;

// Parts of A, then those of B.
struct SplitLaunch {
  SplitProblem problem[2];
  FastDivisor parts_per_row[2];
  FastDivisor parts_per_matrix[2];
  int32_t parts_of_a, parts;
  int32_t blocks;
  int32_t* scale_bits;
  uint8_t* found;  // by each block
};

// The least and the largest magnitude of what a thread has read, as bits. A zero is no least.
struct Magnitudes {
  uint32_t least = 0xffffffff;  // less 1
  uint32_t most = 0;

  template <int kCount>
  __device__ __forceinline__ void take(const float (&values)[kCount]) {
#pragma unroll
    for (const float value : values) {
      const uint32_t bits = __float_as_uint(value) & 0x7fffffff;
      least = min(least, bits - 1);
      most = max(most, bits);
    }
  }
  static constexpr uint32_t power(int exponent) { return uint32_t(127 + exponent) << 23; }
  __device__ __forceinline__ uint32_t found() const {
    const bool any = least != 0xffffffff;
    return (any && least + 1 < power(-60) ? kTiny : 0) |
           (any && least + 1 < power(-100) ? kVanishing : 0) | (most >= power(50) ? kLarge : 0) |
           (most >= power(100) ? kOverflowing : 0);
  }
};

// Elements of a row, of which there are `count`; zeros for others.
template <int kCount>
__device__ __forceinline__ void read(float (&value)[kCount], const float* from, int count) {
  if (count >= kCount && reinterpret_cast<uint64_t>(from) % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + i);
      value[i] = four.x, value[i + 1] = four.y, value[i + 2] = four.z, value[i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) value[i] = i < count ? from[i] : 0.f;
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

// Elements along k, from `k` on, of a row of the planes that begins at `row`.
__device__ __forceinline__ void split(const SplitProblem& p, float (&rest)[kWidth],
                                      __nv_bfloat16* row, int32_t k, float scale) {
  __nv_bfloat16* to = row + k;
#pragma unroll 1
  for (int i = 0; i < p.count; ++i, to += p.plane_k) {
    uint32_t word[kWidth / 2];
#pragma unroll
    for (int j = 0; j < kWidth; j += 2) {
      word[j / 2] = i == 0 ? pack<__nv_bfloat16>(first_plane(rest[j]), first_plane(rest[j + 1]))
                           : pack<__nv_bfloat16>(rest[j], rest[j + 1]);
      const float2 plane = unpack<__nv_bfloat16>(word[j / 2]);
      rest[j] = (rest[j] - plane.x) * scale;
      rest[j + 1] = (rest[j + 1] - plane.y) * scale;
    }
    *reinterpret_cast<uint4*>(to) = {word[0], word[1], word[2], word[3]};
  }
}

// A matrix of an operand, and where its planes go.
struct Matrix {
  const float* in;
  __nv_bfloat16* out;
};

// Of complex numbers, what stands at (k, n) of the real matrix, given the part that it is.
__device__ __forceinline__ float part_of(float value, int k, int n) {
  return k % 2 == 1 && n % 2 == 0 ? -value : value;
}

// Part (rows, columns) of kRows x kColumns.
__device__ __forceinline__ void split_k_major(const SplitProblem& p, const Matrix& matrix,
                                              int32_t rows, int32_t columns, float scale,
                                              Magnitudes* magnitudes) {
  const int32_t k = columns * kColumns + threadIdx.x * kWidth;
  if (k >= p.plane_k) return;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int32_t row = rows * kRows + i;
    if (row >= p.rows) break;
    float value[kWidth];
    read(value, matrix.in + row * p.in.ld + k, p.columns - k);
    magnitudes->take(value);
    if (!p.pairs) {
      split(p, value, matrix.out + row * p.out_ld, k, scale);
      continue;
    }
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      float half[kWidth];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) half[j] = part_of(value[j ^ part], j, part);
      split(p, half, matrix.out + (2 * row + part) * p.out_ld, k, scale);
    }
  }
}

// Part (rows, columns) of kSide x kSide: rows of it are along k.
__device__ __forceinline__ void split_mn_major(const SplitProblem& p, const Matrix& matrix,
                                               int32_t rows, int32_t columns, float scale,
                                               Magnitudes* magnitudes) {
  __shared__ float tile[kSide * kPitch];
  constexpr int kReaders = kSide / 4;  // of a row
  const int32_t in_rows = p.pairs ? kSide / 2 : kSide;
#pragma unroll
  for (int i = 0; i < kSide; i += kThreads / kReaders) {
    const int32_t row = i + threadIdx.x / kReaders;
    if (row >= in_rows) break;
    const int32_t k = rows * in_rows + row;
    const int32_t column = threadIdx.x % kReaders * 4;
    const int32_t mn = columns * kSide + column;
    float value[4] = {};
    if (k < p.rows) read(value, matrix.in + k * p.in.ld + mn, p.columns - mn);
    magnitudes->take(value);
#pragma unroll
    for (int j = 0; j < 4; ++j) tile[row * kPitch + column + j] = value[j];
  }
  __syncthreads();
  constexpr int kWriters = kSide / kWidth;  // of a row
#pragma unroll
  for (int i = 0; i < kSide; i += kThreads / kWriters) {
    const int32_t column = i + threadIdx.x / kWriters;
    const int32_t mn = columns * kSide + column;
    const int32_t k = threadIdx.x % kWriters * kWidth;
    float value[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      value[j] = p.pairs ? part_of(tile[(k + j) / 2 * kPitch + (column ^ j % 2)], j, column)
                         : tile[(k + j) * kPitch + column];
    }
    if (mn < p.columns) split(p, value, matrix.out + mn * p.out_ld, rows * kSide + k, scale);
  }
  __syncthreads();  // the tile is written anew
}

// Returns what there is in the part.
__device__ __forceinline__ uint32_t split_part(const SplitLaunch& launch, int32_t part,
                                               float scale) {
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
    split_k_major(p, matrix, rows, columns, scale, &magnitudes);
  } else {
    split_mn_major(p, matrix, rows, columns, scale, &magnitudes);
  }
  return magnitudes.found() << which * kBitsOfB;
}

// Of all threads.
__device__ __forceinline__ uint32_t either(uint32_t found) {
  __shared__ uint32_t all;
  if (threadIdx.x == 0) all = 0;
  __syncthreads();
  if (found != 0) atomicOr(&all, found);
  __syncthreads();
  return all;
}

__global__ void __launch_bounds__(kThreads)
    split_kernel(const __grid_constant__ SplitLaunch launch) {
  uint32_t found = 0;
#pragma unroll 1
  for (int32_t part = blockIdx.x; part < launch.parts; part += gridDim.x) {
    found |= split_part(launch, part, 1.f);
  }
  found = either(found);
  if (threadIdx.x == 0) launch.found[blockIdx.x] = static_cast<uint8_t>(found);
}

// Two planes may be further apart, so that as little of a denormal is lost as of three planes,
// where no sum over products of order 1 can be beyond float32's range by it.
__device__ __forceinline__ int32_t scale_bits(uint32_t found, int32_t count) {
  const uint32_t either = found | found >> kBitsOfB;
  const uint32_t both = found & found >> kBitsOfB;
  if ((either & (kVanishing | kOverflowing)) == 0 && (both & (kTiny | kLarge)) == 0) return 0;
  return count == 2 && (either & kLarge) == 0 ? 2 * kPlaneBits : kPlaneBits;
}

// Splits once more where planes have to be scaled.
__global__ void __launch_bounds__(kThreads)
    scale_kernel(const __grid_constant__ SplitLaunch launch) {
  uint32_t found = 0;
  for (int32_t i = threadIdx.x; i < launch.blocks; i += kThreads) found |= launch.found[i];
  const int32_t bits = scale_bits(either(found), launch.problem[0].count);
  if (blockIdx.x == 0 && threadIdx.x == 0) *launch.scale_bits = bits;
  if (bits == 0) return;
  const float scale = static_cast<float>(1 << bits);
#pragma unroll 1
  for (int32_t part = blockIdx.x; part < launch.parts; part += gridDim.x) {
    split_part(launch, part, scale);
  }
}

}  // namespace

int64_t plan_split(SplitProblem* problem) {
  SplitProblem& p = *problem;
  p.out_ld = int64_t{p.count} * p.plane_k;
  const int64_t rows = p.major == Major::kMn ? p.columns : p.pairs ? 2 * p.rows : p.rows;
  int64_t elements = p.out_ld * rows;
  for (int i = p.batch_rank - 1; i >= 0; --i) {
    const bool broadcast = p.in.batch.stride[i] == 0;
    if (broadcast) p.batch_shape[i] = 1;
    p.out_batch.stride[i] = broadcast ? 0 : elements;
    elements *= p.batch_shape[i];
  }
  return ceil_div(2 * elements, kLineBytes) * kLineBytes;
}

cudaError_t launch_splits(const SplitProblem (&problems)[2], void* state, cudaStream_t stream) {
  SplitLaunch launch = {};
  launch.scale_bits = static_cast<int32_t*>(state);
  launch.found = static_cast<uint8_t*>(state) + kLineBytes;
  int64_t parts = 0;
  for (int i = 0; i < 2; ++i) {
    const SplitProblem& p = launch.problem[i] = problems[i];
    const bool k_major = p.major == Major::kK;
    const int64_t per_row = k_major ? ceil_div(p.plane_k, kColumns) : ceil_div(p.columns, kSide);
    const int64_t per_matrix = per_row * (k_major ? ceil_div(p.rows, kRows) : p.plane_k / kSide);
    int64_t batch = 1;
    for (int j = 0; j < p.batch_rank; ++j) batch *= p.batch_shape[j];
    // To one step of the grid beyond.
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
  constexpr unsigned kFew = 128;  // which mostly have nothing to do
  grid.gridDim.x = std::min(grid.gridDim.x, kFew);
  return cudaLaunchKernelEx(&grid, scale_kernel, launch);
}

}  // namespace jax_tcgemm
