// One row of the kernel table, as a C++20 template value. The rows themselves are in
// jax_tcgemm/kernels/table.py; cuda/build/generate.py writes them for the compiler.

#ifndef JAX_TCGEMM_KERNEL_CONFIG_H_
#define JAX_TCGEMM_KERNEL_CONFIG_H_

#include "arithmetic.h"

namespace jax_tcgemm {

// The instructions of a kernel:
//   kSimt: float32 FMA.
//   kSm75: ldmatrix and mma.sync.
//   kSm80: cp.async as well.
//   kSm90: TMA, mbarrier and wgmma.
enum class Arch { kSimt, kSm75, kSm80, kSm90 };

// The way of operands from global to shared memory.
//   kCpAsync: 16-byte cp.async; base, strides and contiguous extent are multiples of 16 bytes.
//   kRegister: 16-byte loads through registers, for the same operands.
//   kRealign: 16-byte loads through registers, shifted to the row's alignment; takes anything.
//   kDirect:  from global memory to registers. simt: takes anything; sm80: 16-byte loads along the
//             contiguous dimension, for the operands of kCpAsync (sm80/direct_kernel.cuh).
//   kTma:     boxes copied by TMA; base and strides are multiples of 16 bytes.
//   kTmaTurned: the same, for few rows of A and an n-major 8-bit B (sm90/streamed_kernel.cuh).
enum class Loader { kCpAsync, kRegister, kRealign, kDirect, kTma, kTmaTurned };

// The way in which the consumer warpgroups of an sm90 kernel share the work.
//   kCooperative: one, two or three warpgroups; each takes some rows of one tile.
//   kPingpong:    two warpgroups, each with its own tile; one multiplies while the other writes.
enum class Schedule { kCooperative, kPingpong };

// The dimension that is divided into consecutive groups, whose sizes only the device knows.
//   kNone: none.
//   kM:    m; each group has its own B (lax: ragged non-contracting).
//   kK:    k; each group makes its own D (lax: ragged contracting).
enum class Grouped { kNone, kM, kK };

// The work of an epilogue, and the epilogues that a kernel has code for.
//   kNone: D is the product, rounded.
//   kSum:  alpha * product + bias + beta * C.
//   kAny:  anything.
enum class EpilogueWork { kNone, kSum, kAny };

// The most blocks of a cluster that any GPU takes.
constexpr int kMaxClusterSize = 16;

// The matrix dimension of an operand that is contiguous in memory.
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
  // Accumulate each k-tile separately and add it in float32. The tensor cores truncate sums instead
  // of rounding them, which makes a float32 result of 16-bit operands less accurate.
  bool promote;
  // sm90: A and B are planes of float32 operands (GemmParams::planes), and nothing else.
  bool planes;
  // B holds complex numbers (GemmParams::pairs_of_b); sm90: it is n-major and goes through
  // registers.
  bool pairs;
  // sm90 kernels: blocks of a cluster along m, n (these share operands) and k (these add up their
  // accumulators). Direct sm80 kernels: split_k counts the warps of a block.
  int cluster_m;
  int cluster_n;
  int split_k;
  Schedule schedule;
  // Two weights: half of tile_n holds columns of the first one, half those of the second. In skinny
  // kernels it is tile_m, which then goes along the columns of D.
  bool gated;
  // sm90: for few rows or few columns. tile_m is along the longer of m and n. If n is longer, the
  // kernel computes D^T = B^T A^T.
  bool skinny;
  Grouped grouped;
  // sm90: the kernel computes D^T = B^T A^T: tile_m and cluster_m are along n, tile_n and cluster_n
  // along m. Tiles then have any multiple of 8 rows of a k-major A. A built epilogue is a bias at
  // most, and D leaves by TMA.
  bool swap_ab;
  // The epilogues of the kernel. They are most of its code and of its compile time.
  EpilogueWork epilogue;

  // sm90: B, read once, goes through registers. Each warp multiplies a part of k for the whole
  // tile, and finishes some columns of the sum.
  constexpr bool streams_b() const { return loader == Loader::kTmaTurned; }

  // sm80: a kernel for little work, without stages or copies.
  constexpr bool is_direct() const { return arch == Arch::kSm80 && loader == Loader::kDirect; }
  // Floats of a row of a warp's sums; neighbouring rows begin in different banks.
  constexpr int direct_pitch() const { return tile_n + 4; }

  constexpr int warp_m() const { return tile_m / warps_m; }
  constexpr int warp_n() const { return tile_n / warps_n; }
  constexpr int cluster_size() const { return cluster_m * cluster_n * split_k; }

  // Columns of D in a tile, or rows of D^T.
  constexpr int output_n() const { return gated && !skinny ? tile_n / 2 : tile_n; }
  // Rows of D in a tile, or columns of D^T.
  constexpr int output_m() const { return gated && skinny ? tile_m / 2 : tile_m; }

  // Kernels for products that only sm90 kernels compute fast: for other GPUs, and for operands that
  // TMA cannot address. They run only if no other row can.
  constexpr bool is_fallback() const {
    return arch == Arch::kSimt && (gated || pairs || grouped != Grouped::kNone);
  }

  // sm90: float32 sums of a thread. With many sums, or with tall tiles of 32-bit operands, no
  // registers are left for unrolled epilogues.
  constexpr int accumulators() const { return tile_m * tile_n / (32 * warps_m * warps_n); }
  constexpr bool unrolls_sums() const {
    return accumulators() <= 128 && !gated && element_bytes(algorithm) * tile_m <= 512;
  }

  // sm90: the blocks that multiply parts of k may also add them up
  // (sm90/split_k/in_workspace.cuh). Large tiles have too much to exchange (lab/README.md).
  constexpr bool has_fixup() const {
    return arch == Arch::kSm90 && schedule == Schedule::kPingpong && !promote && !planes &&
           !gated && !swap_ab && grouped == Grouped::kNone && accumulators() <= 128;
  }

  // Warps that multiply; sm90 kernels have further warps that load.
  constexpr int consumer_warps() const {
    return warps_m * warps_n * (schedule == Schedule::kPingpong ? 2 : 1);
  }
  // The producer is a whole warpgroup if it gives registers to the consumers.
  constexpr int producer_warps() const {
    if (arch != Arch::kSm90) return 0;
    return consumer_warps() > 4 ? 4 : 1;
  }
  constexpr int threads() const {
    if (is_direct()) return 32 * split_k;
    return 32 * (consumer_warps() + producer_warps());
  }

  // sm90: an operand has rows of 128 bytes in shared memory, or shorter ones if the tile has no
  // more. For an mn-major operand whole rows are loaded. With swap_ab, tile_n belongs to a k-major
  // operand; 8-bit operands for wgmma are all k-major.
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
  // If B is streamed, the sums of each warp take the place of the ring. With a second weight the
  // ring goes on, and the sums lie behind it. Then come the sums that the blocks of a cluster send
  // to one another. A row has kStreamedPitch floats or integers.
  static constexpr int kStreamedPitch = 128 + 8;
  constexpr int streamed_partials_at() const { return gated ? stages * stage_bytes() : 0; }
  constexpr int streamed_sums_pitch() const { return output_n() / split_k + 8; }
  constexpr int streamed_sums_bytes() const {
    return (gated ? 2 : 1) * split_k * tile_m * streamed_sums_pitch() * 4;
  }
  // mma.sync: each warp has a float32 slab of 16 rows of accumulators. sm90 kernels have buffers
  // instead (staging_bytes), through which D leaves.
  constexpr int slab_bytes() const { return 16 * warp_n() * 4; }
  // swap_ab: a warpgroup's buffer takes 64 columns of D and so many rows. These rows are equal
  // parts of its tile.
  constexpr int transposed_rows() const {
    int rows = 48;
    while (tile_n % rows != 0) rows -= 8;
    return rows;
  }
  constexpr int transposed_buffers() const {
    const int parts = tile_n / transposed_rows() * (warp_m() / 16);
    return parts < 4 ? parts : 4;
  }
  // Bytes of a warpgroup's buffers. Each warp has four buffers of 2 KiB if its tile fills more than
  // two and there is room, else fewer.
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
  // Bytes of a warp's buffer, in which a function compiled at run time gathers its results.
  constexpr int warp_buffer_bytes() const {
    return arch == Arch::kSm90 ? staging_bytes() / 4 : slab_bytes();
  }
  // Checks if such a function finds its operands in that buffer, copied ahead. It reads others in
  // place: the ring of mma.sync kernels uses cp.async while their epilogue runs.
  constexpr bool stages_operands() const { return arch == Arch::kSm90 && !skinny && !streams_b(); }
  constexpr int output_bytes() const {
    if (arch != Arch::kSm90) return consumer_warps() * slab_bytes();
    // Sums of all other blocks that share a tile, and the slab for this block's share.
    if (skinny) return tile_m * tile_n * 4 + kSkinnyPadding * 4 * tile_m;
    return split_k > 1 && !streams_b() ? 0 : consumer_warps() / 4 * staging_bytes();
  }
  static constexpr int kSkinnyPadding = 4;  // floats, for each row of the slab
  // sm90: bytes for the bias of each warpgroup's tile.
  constexpr int bias_bytes() const {
    return skinny || swap_ab || streams_b() ? 0 : consumer_warps() / 4 * tile_n * 4;
  }
  // sm90: blocks for which one SM has shared memory and registers. More than one warpgroup of
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
  static constexpr int kMaxSharedMemoryBytes = 227 * 1024;  // on sm_90, which has the most
  constexpr int shared_memory_bytes() const {
    if (arch == Arch::kSimt) return 0;
    if (is_direct()) return split_k * tile_m * direct_pitch() * 4;
    if (arch == Arch::kSm75) {  // ring and output use the memory one after the other
      return ring_bytes() > output_bytes() ? ring_bytes() : output_bytes();
    }
    const int extra = arch == Arch::kSm90 ? kBarrierBytes + bias_bytes() : 0;
    return ring_bytes() + output_bytes() + extra;
  }

  // Checks if a block has enough shared memory and registers on some GPU. Rows above a device's
  // own limit are skipped at run time: sm_80 has 163 KiB, sm_86 and sm_89 have 99 KiB.
  constexpr bool fits() const {
    const bool has_unrolled_sums = arch == Arch::kSm90 && epilogue == EpilogueWork::kSum &&
                                   !skinny && !swap_ab && !streams_b();
    return shared_memory_bytes() <= kMaxSharedMemoryBytes && (!has_unrolled_sums || unrolls_sums());
  }
};

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_KERNEL_CONFIG_H_
