// One row of the kernel table, as a C++20 template value. The rows themselves stand in
// jax_tcgemm/kernel_table.py; generate.py writes them out for the compiler.

#ifndef JAX_TCGEMM_KERNEL_CONFIG_H_
#define JAX_TCGEMM_KERNEL_CONFIG_H_

namespace jax_tcgemm {

// The arithmetic, named as in jax.lax.DotAlgorithmPreset: type of A, type of B, accumulator.
enum class Algorithm { kBf16Bf16F32, kF16F16F32, kF16F16F16, kTf32Tf32F32 };

// How operands travel from global to shared memory.
//   kCpAsync: 16-byte cp.async; base, strides and contiguous extent are multiples of 16 bytes.
//   kRealign: 16-byte loads through registers, shifted to the row's alignment; takes anything.
//   kDirect:  no shared memory: from global memory to registers; takes anything.
enum class Loader { kCpAsync, kRealign, kDirect };

// Which matrix dimension of an operand is contiguous in memory.
enum class Major { kK, kMn };

constexpr int element_bytes(Algorithm algorithm) {
  return algorithm == Algorithm::kTf32Tf32F32 ? 4 : 2;
}

struct KernelConfig {
  Algorithm algorithm;
  int tile_m;
  int tile_n;
  int tile_k;
  int warps_m;
  int warps_n;
  int stages;
  Loader loader;
  // Accumulate each k-tile apart and add it in float32. The tensor cores cut sums off instead of
  // rounding them, which a float32 result of 16-bit operands would show.
  bool promote;

  constexpr int warp_m() const { return tile_m / warps_m; }
  constexpr int warp_n() const { return tile_n / warps_n; }
  constexpr int threads() const { return 32 * warps_m * warps_n; }
  constexpr int stage_bytes() const {
    return (tile_m + tile_n) * tile_k * element_bytes(algorithm);
  }
  // The ring, then a float32 slab of 16 rows of accumulators for each warp.
  constexpr int ring_bytes() const { return stages * stage_bytes(); }
  constexpr int slab_bytes() const { return 16 * warp_n() * 4; }
  constexpr int shared_memory_bytes() const {
    if (loader == Loader::kDirect) return 0;
    return ring_bytes() + warps_m * warps_n * slab_bytes();
  }
};

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_KERNEL_CONFIG_H_
