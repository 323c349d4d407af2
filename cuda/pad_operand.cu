// The copy of pad_operand.h. Each thread writes 16 bytes at a time, made of two aligned loads; the
// second is the first of its neighbour and comes from L1.

#include "pad_operand.h"

#include <stdint.h>

#include "common/realign.cuh"
#include "ptx/global_memory.cuh"

namespace jax_tcgemm {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsPerBlock = 8;

template <typename Element>
__global__ void __launch_bounds__(kThreads) pad_kernel(const __grid_constant__ PadProblem p) {
  constexpr int kChunkElements = 16 / sizeof(Element);
  const uint64_t begin = reinterpret_cast<uint64_t>(p.in.data);
  const uint64_t end = begin + p.in.span * sizeof(Element);
  const int column = (blockIdx.x * kThreads + threadIdx.x) * kChunkElements;
  if (column >= p.columns) return;
  const int bytes = min(16, int((p.columns - column) * sizeof(Element)));

  int64_t batch = blockIdx.z;
  int64_t in_offset = 0;
  int64_t out_offset = 0;
  for (int i = p.batch_rank - 1; i >= 0; --i) {
    const int64_t outer = batch / p.batch_shape[i];
    const int64_t index = batch - outer * p.batch_shape[i];
    in_offset += index * p.in.batch.stride[i];
    out_offset += index * p.out_batch.stride[i];
    batch = outer;
  }
  for (int64_t first = int64_t{blockIdx.y} * kRowsPerBlock; first < p.rows;
       first += int64_t{gridDim.y} * kRowsPerBlock) {
#pragma unroll
    for (int i = 0; i < kRowsPerBlock; ++i) {
      const int64_t row = first + i;
      if (row >= p.rows) break;
      const uint64_t address =
          begin + (in_offset + row * p.in.ld + column) * int64_t(sizeof(Element));
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
      Element* out = static_cast<Element*>(p.out) + out_offset + row * p.out_ld + column;
      *reinterpret_cast<uint4*>(out) = {word[0], word[1], word[2], word[3]};
    }
  }
}

}  // namespace

int64_t plan_pad(PadProblem* problem) {
  const int64_t chunk = 16 / problem->element_bytes;
  problem->out_ld = (problem->columns + chunk - 1) / chunk * chunk;
  int64_t elements = problem->rows * problem->out_ld;
  for (int i = problem->batch_rank - 1; i >= 0; --i) {
    const bool broadcast = problem->in.batch.stride[i] == 0;
    if (broadcast) problem->batch_shape[i] = 1;
    problem->out_batch.stride[i] = broadcast ? 0 : elements;
    elements *= problem->batch_shape[i];
  }
  return elements * problem->element_bytes;
}

cudaError_t launch_pad(const PadProblem& problem, cudaStream_t stream) {
  const int64_t chunks = problem.out_ld * problem.element_bytes / 16;
  int64_t batch = 1;
  for (int i = 0; i < problem.batch_rank; ++i) batch *= problem.batch_shape[i];
  const int64_t row_blocks = (problem.rows + kRowsPerBlock - 1) / kRowsPerBlock;
  cudaLaunchConfig_t launch = {};
  launch.gridDim = dim3(static_cast<unsigned>((chunks + kThreads - 1) / kThreads),
                        static_cast<unsigned>(row_blocks < 65535 ? row_blocks : 65535),
                        static_cast<unsigned>(batch));
  launch.blockDim = dim3(kThreads);
  launch.stream = stream;
  return problem.element_bytes == 2 ? cudaLaunchKernelEx(&launch, pad_kernel<uint16_t>, problem)
                                    : cudaLaunchKernelEx(&launch, pad_kernel<float>, problem);
}

}  // namespace jax_tcgemm
