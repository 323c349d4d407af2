// Numbers that host code, kernels and Python share; Python reads them from the module
// (cuda/ffi/bindings.cc).

#ifndef JAX_TCGEMM_SHARED_LIMITS_H_
#define JAX_TCGEMM_SHARED_LIMITS_H_

namespace jax_tcgemm {

// The most parts of k.
constexpr int kMostSplits = 64;

// Neighbouring columns of C and D that an epilogue reads and writes together. The kernel that adds
// up parts of k does the same.
constexpr int kVectorColumns = 4;

// Workspace for the flags of blocks that add up parts of k themselves: see sm90::has_fixup.
constexpr int kFixupFlagBytes = 8192;

// Blocks along the grid's second and third dimension.
constexpr int kMaxGridRows = 65535;

// Batch dimensions that a TMA descriptor can have in addition to a matrix's two.
constexpr int kMaxTmaBatchRank = 3;

// A k-tile of the kernels that multiply planes.
constexpr int kPlaneTileK = 64;

// Workspace of launch_splits: a PlaneScale, then the exponents that each block found.
constexpr int kSplitStateBytes = 128 + 1024 * 4;

// Operands and results of an epilogue that is compiled at run time.
constexpr int kMaxCompiledOperands = 12;
constexpr int kMaxCompiledResults = 6;

// Block scales of 8-bit operands: one scale for 1 x kScaleBlock (k) elements of A, and one for
// kScaleBlock x kScaleBlock elements of B.
constexpr int kScaleBlock = 128;

// Rows and columns of a block of results. A reduction leaves one number for each block, or one for
// each row or column of a block (epilogue/compiled_io.cuh).
constexpr int kReducedBlock = 16;

// A pass without a product (passes/compiled_pass.cuh): the warps of a block, the neighbouring
// values of a thread, and the rows and columns of a block.
constexpr int kPassWarps = 8;
constexpr int kPassValues = 8;
constexpr int kPassRows = 64;
constexpr int kPassColumns = 32 * kPassValues;

// The most devices among which an overlapped product divides its rows.
constexpr int kMostPeers = 8;

// How GPUs reach each other's memory.
constexpr int kNoLink = 0;
constexpr int kSlowLink = 1;  // by PCIe
constexpr int kNvlink = 2;

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_SHARED_LIMITS_H_
