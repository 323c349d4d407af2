// Packs 4-bit values: see pack_values.h. A block packs four tiles of 64 x 64 that lie side by side
// in the rows of the matrix.
//
//   memory -> registers -> shared memory | barrier | 8 values for each of 16 words of a thread, as
//   packed_layout.py orders them -> memory

#include "passes/pack_values.h"

#include "common/ceil_div.h"
#include "packed_config.h"
#include "ptx/global_memory.cuh"

namespace jax_tcgemm {
namespace {

constexpr int kThreads = 128;  // those of a tile of the layout
constexpr int kTiles = 4;
constexpr int kVectorBytes = 16;
constexpr int kTileRowBytes = kPackedTile / 2;
constexpr int kRowVectors = kTiles * kTileRowBytes / kVectorBytes;
// A row is one vector longer, so that the rows that a warp reads lie in different banks.
constexpr int kRowBytes = (kRowVectors + 1) * kVectorBytes;
constexpr int kWords = 4;  // of a thread and tile, one for each 16 k
constexpr int kBits = 4;
constexpr uint32_t kLow = 0xF;
// The high element of a register of the layout lies so many bits above the low one.
constexpr int kHighShift = 16;

// Loads rows of four tiles; what the matrix lacks is zeros.
__device__ __forceinline__ void load_rows(char* tile, const PackProblem& p, int row0, int vector0) {
  const int rows = p.transposed ? p.n : p.k;
  const int vectors = (p.transposed ? p.k : p.n) / kPackVectorValues;
  const int64_t row_of_all = int64_t{blockIdx.z} * rows + row0;
#pragma unroll
  for (int i = 0; i < kPackedTile * kRowVectors / kThreads; ++i) {
    const int index = threadIdx.x + i * kThreads;
    const int row = index / kRowVectors;
    const int vector = index % kRowVectors;
    const bool exists = row0 + row < rows && vector0 + vector < vectors;
    const int64_t at = (row_of_all + row) * vectors + vector0 + vector;
    uint32_t word[4];
    ptx::load_global_16_if(word, reinterpret_cast<uint64_t>(p.in) + at * kVectorBytes, exists);
    *reinterpret_cast<uint4*>(tile + row * kRowBytes + vector * kVectorBytes) = {word[0], word[1],
                                                                                 word[2], word[3]};
  }
}

// The place of a thread in a tile of the layout: warp, group of lanes, and lane in the group.
struct Place {
  int warp, group, lane;
};

// Returns a word of the layout from rows along n: a 32-bit word has the eight columns of a warp's
// groups.
__device__ __forceinline__ uint32_t word_of_columns(const char* tile, const Place& at, int word) {
  uint32_t packed = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // k: low and high element of a register, then of the next but one
    const int row = 16 * word + 2 * at.lane + i % 2 + 8 * (i / 2);
    const uint2 read = *reinterpret_cast<const uint2*>(tile + row * kRowBytes + 8 * at.warp);
    const int shift = kBits * 2 * (i / 2) + kHighShift * (i % 2);
    packed |= ((read.x >> (kBits * at.group)) & kLow) << shift;
    packed |= ((read.y >> (kBits * at.group)) & kLow) << (shift + kBits);
  }
  return packed;
}

// Moves the second value of a byte to the place of a high element.
__device__ __forceinline__ uint32_t apart(uint32_t byte) {
  return (byte & kLow) | ((byte & (kLow << kBits)) << (kHighShift - kBits));
}

// Returns a word of the layout from rows along k: a byte has both elements of a register.
__device__ __forceinline__ uint32_t word_of_rows(const char* tile, const Place& at, int word) {
  uint32_t packed = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = 16 * at.warp + at.group + 8 * half;
    const uint2 read = *reinterpret_cast<const uint2*>(tile + row * kRowBytes + 8 * word);
    packed |= apart(read.x >> (8 * at.lane)) << (kBits * half);
    packed |= apart(read.y >> (8 * at.lane)) << (kBits * (half + 2));
  }
  return packed;
}

template <bool kTransposed>
__global__ void __launch_bounds__(kThreads)
    pack_kernel(const __grid_constant__ PackProblem problem) {
  __shared__ __align__(kVectorBytes) char rows[kPackedTile * kRowBytes];
  const int thread = threadIdx.x;
  const Place at = {thread / 32, thread % 32 / 4, thread % 4};
  const int first = blockIdx.x * kTiles;  // along the rows of the matrix
  const int down = blockIdx.y;
  load_rows(rows, problem, down * kPackedTile, first * kPackedTile / kPackVectorValues);
  __syncthreads();
  const int k_tiles = problem.k / kPackedTile;
  const int n_tiles = (problem.n + kPackedTile - 1) / kPackedTile;
  auto* const out =
      static_cast<uint4*>(problem.out) + int64_t{blockIdx.z} * n_tiles * k_tiles * kThreads;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    if (first + i >= (kTransposed ? k_tiles : n_tiles)) break;
    const char* tile = rows + i * kTileRowBytes;
    uint32_t word[kWords];
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      word[j] = (kTransposed ? word_of_rows(tile, at, j) : word_of_columns(tile, at, j)) ^
                problem.flipped;
    }
    const int64_t place =
        kTransposed ? int64_t{down} * k_tiles + first + i : int64_t{first + i} * k_tiles + down;
    out[place * kThreads + thread] = {word[0], word[1], word[2], word[3]};
  }
}

}  // namespace

cudaError_t launch_pack(const PackProblem& problem, cudaStream_t stream) {
  const int rows = problem.transposed ? problem.n : problem.k;
  const int columns = problem.transposed ? problem.k : problem.n;
  cudaLaunchConfig_t grid = {};
  grid.gridDim =
      dim3(ceil_div(columns, kTiles * kPackedTile), ceil_div(rows, kPackedTile), problem.batch);
  grid.blockDim = dim3(kThreads);
  grid.stream = stream;
  return problem.transposed ? cudaLaunchKernelEx(&grid, pack_kernel<true>, problem)
                            : cudaLaunchKernelEx(&grid, pack_kernel<false>, problem);
}

}  // namespace jax_tcgemm
