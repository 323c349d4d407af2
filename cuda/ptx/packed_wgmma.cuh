// The wgmma instructions of kernels for packed weights: A (16-bit floats) from registers, a k-major
// B from shared memory.

#pragma once

#include "ptx/wgmma.cuh"

namespace jax_tcgemm::ptx {

// Has one static function, run(d, fragments of A, descriptor of B, accumulate); see Wgmma.
template <Algorithm kAlgorithm, int kN>
struct WgmmaOfRegisters;

#include "packed_wgmma_instructions.inc"

}  // namespace jax_tcgemm::ptx
