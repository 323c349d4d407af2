// One row of the kernel table, as a C++20 template value. The rows themselves stand in
// jax_tcgemm/kernels/table.py; cuda/build/generate.py writes them out for the compiler.

#ifndef JAX_TCGEMM_KERNEL_CONFIG_H_
#define JAX_TCGEMM_KERNEL_CONFIG_H_

#include "arithmetic.h"

namespace jax_tcgemm {

// The instructions a kernel is made of: float32 FMA; ldmatrix and mma.sync; cp.async as well; TMA,
// mbarrier and wgmma.
enum class Arch { kSimt, kSm75, kSm80, kSm90 };

// How operands travel from global to shared memory.
//   kCpAsync: 16-byte cp.async; base, strides and contiguous extent are multiples of 16 bytes.
//   kRegister: 16-byte loads through registers, for the same operands.
//   kRealign: 16-byte loads through registers, shifted to the row's alignment; takes anything.
//   kDirect:  from global memory to registers. simt: takes anything; sm80: 16-byte loads where they
//             lie together, for the operands of kCpAsync (sm80/direct_kernel.cuh).
//   kTma:     boxes copied by TMA; base and strides are multiples of 16 bytes.
//   kTmaTurned: the same, of few rows of A and a B of 8 bits that is n-major
//             (sm90/streamed_kernel.cuh).
enum class Loader { kCpAsync, kRegister, kRealign, kDirect, kTma, kTmaTurned };

// How the consumer warpgroups of an sm90 kernel share the work.
//   kCooperative: one, two or three; each takes some rows of one tile.
//   kPingpong:    two, each with a tile of its own; one multiplies while the other writes.
enum class Schedule { kCooperative, kPingpong };

// What consecutive groups, whose sizes only the device knows, divide: nothing; m, so that each
// group has its own B (lax: ragged non-contracting); k, so that each group makes its own D (lax:
// ragged contracting).
enum class Grouped { kNone, kM, kK };

// How much there is to do in an epilogue, and what a kernel has the code for.
//   kNone: D is the product, rounded.
//   kSum:  alpha * product + bias + beta * C.
//   kAny:  anything.
enum class EpilogueWork { kNone, kSum, kAny };

// Blocks of a cluster, at most, that any GPU takes.
constexpr int kMaxClusterSize = 16;

// Which matrix dimension of an operand is contiguous in memory.
enum class Major { kK, kMn };

struct KernelConfig {
  Arch arch;
  Algorithm algorithm;
  int tile_m;
  int tile_n;
  int tile_k;
  // Warps that compute one tile.
  int warps_m;
  int warps_n;
  int stages;
  Loader loader;
  // Accumulate each k-tile apart and add it in float32. The tensor cores cut sums off instead of
  // rounding them, which a float32 result of 16-bit operands would show.
  bool promote;
  // sm90: A and B are planes of float32 operands (GemmParams::planes), and nothing else.
  bool planes;
  // B is of complex numbers (GemmParams::pairs_of_b); sm90: n-major, and goes through registers.
  bool pairs;
  // Of sm90 kernels: blocks of a cluster along m, n (which share operands) and k (which add up
  // their accumulators). Of direct sm80 kernels split_k is of the warps of a block.
  int cluster_m;
  int cluster_n;
  int split_k;
  Schedule schedule;
  // Two weights: tile_n is half of one's columns and half of the other's.
  bool gated;
  // sm90: for few rows or few columns. tile_m goes along the longer of m and n, whichever operand
  // that belongs to; where it is n, D^T = B^T A^T is computed.
  bool skinny;
  Grouped grouped;
  // sm90: D^T = B^T A^T is computed: tile_m and cluster_m go along n, tile_n and cluster_n along m.
  // So m is cut into any multiples of 8 rows of a k-major A. With a bias at most, and D by TMA.
  bool swap_ab;
  // What epilogues the kernel has: most of its code and of the time that it takes to compile.
  EpilogueWork epilogue;

  // sm90: B, read once, goes through registers. Each warp multiplies a part of k by the whole tile,
  // and finishes some columns of the sum.
  constexpr bool streams_b() const { return loader == Loader::kTmaTurned; }

  // sm80: for little work, without stages or copies.
  constexpr bool is_direct() const { return arch == Arch::kSm80 && loader == Loader::kDirect; }
  // Floats of a row of a warp's sums; rows begin in other banks.
  constexpr int direct_pitch() const { return tile_n + 4; }

  constexpr int warp_m() const { return tile_m / warps_m; }
  constexpr int warp_n() const { return tile_n / warps_n; }
  constexpr int cluster_size() const { return cluster_m * cluster_n * split_k; }

  // Columns of D in a tile.
  constexpr int output_n() const { return gated ? tile_n / 2 : tile_n; }

  // What computes what only sm90 kernels compute in good time, on other GPUs and of operands that
  // TMA cannot address: taken where nothing else is.
  constexpr bool is_fallback() const {
    return arch == Arch::kSimt && (gated || pairs || grouped != Grouped::kNone);
  }

  // sm90: float32 sums that a thread holds. With many of them, or tall tiles of 32-bit operands, no
  // registers are left for the epilogues that are unrolled.
  constexpr int accumulators() const { return tile_m * tile_n / (32 * warps_m * warps_n); }
  constexpr bool unrolls_sums() const {
    return accumulators() <= 128 && !gated && element_bytes(algorithm) * tile_m <= 512;
  }

  // sm90: parts of k may be added up by the blocks that multiply them
  // (sm90/split_k/in_workspace.cuh). Large tiles have too much to exchange (docs/performance.md).
  constexpr bool has_fixup() const {
    return arch == Arch::kSm90 && schedule == Schedule::kPingpong && !promote && !planes &&
           !gated && !swap_ab && grouped == Grouped::kNone && accumulators() <= 128;
  }

  // Warps that multiply; sm90 kernels have others that load.
  constexpr int consumer_warps() const {
    return warps_m * warps_n * (schedule == Schedule::kPingpong ? 2 : 1);
  }
  // A whole warpgroup where registers are to move from it to the consumers.
  constexpr int producer_warps() const {
    if (arch != Arch::kSm90) return 0;
    return consumer_warps() > 4 ? 4 : 1;
  }
  constexpr int threads() const {
    if (is_direct()) return 32 * split_k;
    return 32 * (consumer_warps() + producer_warps());
  }

  // sm90: an operand is rows of 128 bytes, and of an mn-major one whole rows are loaded; rows of
  // fewer bytes if the tile has no more. Where operands are swapped tile_n is a k-major one's, and
  // those of 8 bits all are.
  constexpr int mn_row_bytes(int tile_mn) const {
    const int bytes = tile_mn * element_bytes(algorithm);
    return bytes < 128 ? bytes : 128;
  }
  constexpr int operand_bytes(int tile_mn) const {
    const int row = mn_row_bytes(tile_mn) / element_bytes(algorithm);
    const bool may_be_mn_major = !swap_ab && element_bytes(algorithm) > 1;
    if (arch == Arch::kSm90 && may_be_mn_major) tile_mn = (tile_mn + row - 1) / row * row;
    return tile_mn * tile_k * element_bytes(algorithm);
  }
  constexpr int stage_bytes() const {
    return operand_bytes(tile_m) + operand_bytes(streams_b() ? output_n() : tile_n);
  }
  constexpr int ring_bytes() const {
    const int ring = stages * stage_bytes();
    if (!streams_b()) return ring;
    const int partials = consumer_warps() * tile_m * kStreamedPitch * 4;
    const int end = streamed_partials_at() + partials;
    return (end > ring ? end : ring) + streamed_sums_bytes();
  }
  // Where B is streamed the sums of each warp take the place of the ring, or one beside it where
  // that goes on with a second weight; then come those that the blocks of a cluster send to one
  // another. Rows of so many floats or integers.
  static constexpr int kStreamedPitch = 128 + 8;
  constexpr int streamed_partials_at() const { return gated ? stages * stage_bytes() : 0; }
  constexpr int streamed_sums_pitch() const { return output_n() / split_k + 8; }
  constexpr int streamed_sums_bytes() const {
    return (gated ? 2 : 1) * split_k * tile_m * streamed_sums_pitch() * 4;
  }
  // A float32 slab of 16 rows of accumulators for each warp of an mma.sync kernel; the buffers of
  // the warps of an sm90 kernel, through which D leaves.
  constexpr int slab_bytes() const { return 16 * warp_n() * 4; }
  // Swapped: a warpgroup's buffers take 64 columns of D and so many rows, equal parts of its
  // tile.
  constexpr int transposed_rows() const {
    int rows = 48;
    while (tile_n % rows != 0) rows -= 8;
    return rows;
  }
  constexpr int transposed_buffers() const {
    const int parts = tile_n / transposed_rows() * (warp_m() / 16);
    return parts < 4 ? parts : 4;
  }
  // Of a warpgroup: four buffers of 2 KiB for each warp, if its tile fills more than two and there
  // is room.
  constexpr int staging_bytes() const {
    if (swap_ab) return transposed_buffers() * transposed_rows() * 128;
    constexpr int kBuffer = 4 * 2 * 1024;
    if (streams_b()) return 2 * kBuffer;
    const int fixed = ring_bytes() + bias_bytes() + kBarrierBytes;
    const int tile_bytes = 4 * warp_m() * output_n() * 2;
    int buffers = tile_bytes > 2 * kBuffer ? 4 : 2;
    while (buffers > 1 &&
           fixed + consumer_warps() / 4 * buffers * kBuffer > kMaxSharedMemoryBytes) {
      buffers /= 2;
    }
    return buffers * kBuffer;
  }
  constexpr int output_bytes() const {
    if (arch != Arch::kSm90) return consumer_warps() * slab_bytes();
    // Sums of all other blocks that share a tile, and the slab of this one's share.
    if (skinny) return tile_m * tile_n * 4 + kSkinnyPadding * 4 * tile_m;
    return split_k > 1 && !streams_b() ? 0 : consumer_warps() / 4 * staging_bytes();
  }
  static constexpr int kSkinnyPadding = 4;  // float32 of a row of the slab
  // sm90: the barriers, and the bias of each warpgroup's tile.
  constexpr int bias_bytes() const {
    return skinny || swap_ab || streams_b() ? 0 : consumer_warps() / 4 * tile_n * 4;
  }
  // sm90: blocks that shared memory and registers let on one SM; more than one warpgroup of
  // consumers takes all registers.
  constexpr int blocks_on_sm() const {
    constexpr int kSharedMemoryPerSm = 228 * 1024;
    constexpr int kReservedPerBlock = 1024;
    constexpr int kRegisters = 64 * 1024;
    if (consumer_warps() > 4) return 1;
    const int by_memory = kSharedMemoryPerSm / (shared_memory_bytes() + kReservedPerBlock);
    const int by_registers = kRegisters / (threads() * (skinny ? 128 : 168));
    return by_memory < by_registers ? by_memory : by_registers;
  }
  static constexpr int kBarrierBytes = 512;
  static constexpr int kMaxSharedMemoryBytes = 227 * 1024;
  constexpr int shared_memory_bytes() const {
    if (arch == Arch::kSimt) return 0;
    if (is_direct()) return split_k * tile_m * direct_pitch() * 4;
    if (arch == Arch::kSm75) {  // one after the other
      return ring_bytes() > output_bytes() ? ring_bytes() : output_bytes();
    }
    const int extra = arch == Arch::kSm90 ? kBarrierBytes + bias_bytes() : 0;
    return ring_bytes() + output_bytes() + extra;
  }
};

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_KERNEL_CONFIG_H_
