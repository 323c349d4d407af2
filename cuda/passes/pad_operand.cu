// Makes the copies of pad_operand.h. Each thread writes 16 bytes at a time from two aligned loads.
// The second load is its neighbour's first one, so it comes from L1.

#include "passes/pad_operand.h"

#include <stdint.h>

#include <algorithm>
#include <bit>
#include <limits>

#include "common/ceil_div.h"
#include "common/fast_divisor.h"
#include "common/realign.cuh"
#include "common/saturating.h"
#include "ptx/global_memory.cuh"

namespace jax_tcgemm {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsPerBlock = 8;

constexpr int64_t kLineBytes = 128;

// Returns the bytes from one row of the copy to the next; jax_tcgemm/problem/alignment.py has the
// same rule.
int64_t pitch_bytes(int64_t row_bytes) {
  if (row_bytes > kLineBytes / 2) return ceil_div(row_bytes, kLineBytes) * kLineBytes;
  return static_cast<int64_t>(
      std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(row_bytes, 16))));
}

// One or two copies. Each block takes kThreads chunks of kRowsPerBlock rows; the second copy's
// blocks follow the first's.
struct PadLaunch {
  PadProblem problem[2];
  FastDivisor blocks_per_row[2];
  FastDivisor blocks_per_matrix[2];
  int32_t first_blocks;
};

// Elements from the batch's first matrix to matrix `batch`, in the operand and in the copy.
struct BatchOffsets {
  int64_t in = 0;
  int64_t out = 0;

  __device__ __forceinline__ BatchOffsets(const PadProblem& p, int32_t batch) {
    for (int i = p.batch_rank - 1; i >= 0; --i) {
      const int32_t outer = batch / p.batch_shape[i];
      const int64_t index = batch - outer * p.batch_shape[i];
      in += index * p.in.batch.stride[i];
      out += index * p.out_batch.stride[i];
      batch = outer;
    }
  }
};

template <typename Element>
__device__ __forceinline__ void pad_rows(const PadProblem& p, int32_t batch, int32_t first,
                                         int32_t chunk) {
  constexpr int kChunkElements = 16 / sizeof(Element);
  const uint64_t begin = reinterpret_cast<uint64_t>(p.in.data);
  const uint64_t end = begin + p.in.span * sizeof(Element);
  const int32_t column = chunk * kChunkElements;
  if (column >= p.columns) return;
  const int32_t left = p.columns - column;
  const int bytes = left < kChunkElements ? left * int(sizeof(Element)) : 16;
  const BatchOffsets offset(p, batch);
#pragma unroll
  for (int i = 0; i < kRowsPerBlock; ++i) {
    const int64_t row = first + i;
    if (row >= p.rows) break;
    const uint64_t address =
        begin + (offset.in + row * p.in.ld + column) * int64_t(sizeof(Element));
    const int shift = address & 15;
    const uint64_t granule = address - shift;
    const bool want_high = shift + bytes > 16;
    uint32_t low[4], high[4], word[4];
    if (granule >= begin && granule + (want_high ? 32 : 16) <= end) {
      ptx::load_global_16_if(low, granule, true);
      ptx::load_global_16_if(high, granule + 16, want_high);
    } else {
      load_elements<Element>(low, granule, begin, end);
      load_elements<Element>(high, granule + 16, begin, end);
    }
    funnel<Element>(word, low, high, shift);
    keep_leading_bytes(word, bytes);
    Element* out = static_cast<Element*>(p.out) + offset.out + row * p.out_ld + column;
    *reinterpret_cast<uint4*>(out) = {word[0], word[1], word[2], word[3]};
  }
}

template <typename Element>
__global__ void __launch_bounds__(kThreads) pad_kernel(const __grid_constant__ PadLaunch launch) {
  const int32_t block = blockIdx.x;
  const int which = block >= launch.first_blocks;
  const int32_t of_copy = block - which * launch.first_blocks;
  const int32_t batch = launch.blocks_per_matrix[which].divide(of_copy);
  const int32_t rest = of_copy - batch * launch.blocks_per_matrix[which].divisor;
  const int32_t rows = launch.blocks_per_row[which].divide(rest);
  const int32_t columns = rest - rows * launch.blocks_per_row[which].divisor;
  pad_rows<Element>(launch.problem[which], batch, rows * kRowsPerBlock,
                    columns * kThreads + threadIdx.x);
}

}  // namespace

int64_t plan_pad(PadProblem* problem) {
  problem->out_ld =
      pitch_bytes(int64_t{problem->columns} * problem->element_bytes) / problem->element_bytes;
  int64_t elements = mul_sat(problem->rows, problem->out_ld);
  for (int i = problem->batch_rank - 1; i >= 0; --i) {
    const bool broadcast = problem->in.batch.stride[i] == 0;
    if (broadcast) problem->batch_shape[i] = 1;
    problem->out_batch.stride[i] = broadcast ? 0 : elements;
    elements = mul_sat(elements, problem->batch_shape[i]);
  }
  const int64_t bytes = mul_sat(elements, problem->element_bytes);
  return add_sat(bytes, kLineBytes - 1) / kLineBytes * kLineBytes;
}

cudaError_t launch_pads(const PadProblem* problems, int count, cudaStream_t stream) {
  PadLaunch launch = {};
  int64_t blocks = 0;
  for (int i = 0; i < count; ++i) {
    const PadProblem& p = launch.problem[i] = problems[i];
    const int64_t chunks = ceil_div(int64_t{p.columns} * p.element_bytes, 16);
    const int64_t per_row = ceil_div(chunks, kThreads);
    const int64_t per_matrix = per_row * ceil_div(p.rows, kRowsPerBlock);
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
  return problems[0].element_bytes == 2 ? cudaLaunchKernelEx(&grid, pad_kernel<uint16_t>, launch)
                                        : cudaLaunchKernelEx(&grid, pad_kernel<float>, launch);
}

}  // namespace jax_tcgemm
