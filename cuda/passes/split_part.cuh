// Splits one part of a float32 operand into planes: see split_planes.h. A thread splits 8 elements
// along k and writes 16 bytes of each plane. Elements of an mn-major operand go through shared
// memory first.

#ifndef JAX_TCGEMM_PASSES_SPLIT_PART_CUH_
#define JAX_TCGEMM_PASSES_SPLIT_PART_CUH_

#include <cuda_bf16.h>
#include <stdint.h>

#include "common/dtype.cuh"
#include "passes/split_planes.h"

namespace jax_tcgemm::planes {

constexpr int kThreads = 256;
constexpr int kWidth = 8;  // elements of a thread along k
// A part of a k-major operand is kRows x kColumns, a part of an mn-major one kSide x kSide.
constexpr int kRows = 4;
constexpr int kColumns = kThreads * kWidth;
constexpr int kSide = 64;
constexpr int kPitch = kSide + 1;

// The least and the largest magnitude of some numbers, as bits.
struct Magnitudes {
  uint32_t least = 0xffffffff;  // the bits minus 1, so that zeros do not count
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
  __device__ __forceinline__ void merge(const Magnitudes& other, bool also) {
    if (also) least = min(least, other.least), most = max(most, other.most);
  }
};

// Reads elements of a row that has `count` more; the others become zeros.
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

// Rounds to the nearest bfloat16. A number that is neither infinite nor zero stays so: it becomes
// the largest or the smallest bfloat16 instead. Its products with infinity are then right.
__device__ __forceinline__ float first_plane(float value) {
  const float nearest = __bfloat162float(__float2bfloat16_rn(value));
  constexpr float kLargest = 0x1.fep127f;
  constexpr float kSmallest = 0x1p-133f;
  if (isinf(nearest) && !isinf(value)) return copysignf(kLargest, value);
  return nearest == 0.f && value != 0.f ? copysignf(kSmallest, value) : nearest;
}

// Powers of two: factors on an operand, and on the remainder after each plane.
struct Scales {
  float of_operand, of_planes;
};

// Splits elements along k, from `k` on, and writes them to a row of the planes that begins at
// `row`.
__device__ __forceinline__ void split(const SplitProblem& p, float (&rest)[kWidth],
                                      __nv_bfloat16* row, int32_t k, const Scales& scales) {
  __nv_bfloat16* to = row + k;
  const float scale = scales.of_planes;
#pragma unroll
  for (float& value : rest) value *= scales.of_operand;
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

// A matrix of an operand, and the place of its planes.
struct Matrix {
  const float* in;
  __nv_bfloat16* out;
};

// Returns element (k, n) of the real matrix for complex numbers, given its real or imaginary part.
__device__ __forceinline__ float part_of(float value, int k, int n) {
  return k % 2 == 1 && n % 2 == 0 ? -value : value;
}

// Splits part (rows, columns), of kRows x kColumns.
__device__ __forceinline__ void split_k_major(const SplitProblem& p, const Matrix& matrix,
                                              int32_t rows, int32_t columns, const Scales& scales,
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
      split(p, value, matrix.out + row * p.out_ld, k, scales);
      continue;
    }
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      float half[kWidth];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) half[j] = part_of(value[j ^ part], j, part);
      split(p, half, matrix.out + (2 * row + part) * p.out_ld, k, scales);
    }
  }
}

// Splits part (rows, columns), of kSide x kSide. Its rows are along k.
__device__ __forceinline__ void split_mn_major(const SplitProblem& p, const Matrix& matrix,
                                               int32_t rows, int32_t columns, const Scales& scales,
                                               Magnitudes* magnitudes) {
  __shared__ float tile[kSide * kPitch];
  constexpr int kReaders = kSide / 4;  // threads that read a row
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
  constexpr int kWriters = kSide / kWidth;  // threads that write a row
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
    if (mn < p.columns) split(p, value, matrix.out + mn * p.out_ld, rows * kSide + k, scales);
  }
  __syncthreads();  // the next part overwrites the tile
}

}  // namespace jax_tcgemm::planes

#endif  // JAX_TCGEMM_PASSES_SPLIT_PART_CUH_
