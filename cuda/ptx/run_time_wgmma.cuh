// The wgmma instructions of kernels that are compiled at run time, for 8-bit operands.

#pragma once

#include "ptx/wgmma.cuh"

namespace jax_tcgemm::ptx {

#include "run_time_wgmma_instructions.inc"

}  // namespace jax_tcgemm::ptx
