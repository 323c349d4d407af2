// Numbers that host code, kernels and Python share; Python reads them from the module
// (cuda/ffi/bindings.cc).

#ifndef JAX_TCGEMM_SHARED_LIMITS_H_
#define JAX_TCGEMM_SHARED_LIMITS_H_

namespace jax_tcgemm {

// Into how many parts k is split at most.
constexpr int kMostSplits = 64;

// Neighbouring columns of C and D that an epilogue reads and writes together, as does the kernel
// that adds up parts of k.
constexpr int kVectorColumns = 4;

// Workspace for the flags of blocks that add up parts of k themselves: see sm90::has_fixup.
constexpr int kFixupFlagBytes = 8192;

// Batch dimensions that a TMA descriptor can have beside the two of a matrix.
constexpr int kMaxTmaBatchRank = 3;

// A k-tile of the kernels that multiply planes.
constexpr int kPlaneTileK = 64;

// Workspace of launch_splits: a PlaneScale, then what each block found.
constexpr int kSplitStateBytes = 128 + 1024 * 4;

// Operands and results of an epilogue that is compiled at run time.
constexpr int kMaxCompiledOperands = 12;
constexpr int kMaxCompiledResults = 6;

// Scales by blocks of 8-bit operands: of 1 x kScaleBlock (k) of A, of kScaleBlock x kScaleBlock of
// B.
constexpr int kScaleBlock = 128;

// Rows and columns of the results of which a reduction leaves one number, or one for each row or
// column (sm90/output/compiled_io.cuh).
constexpr int kReducedBlock = 16;

// A pass with no product (passes/compiled_pass.cuh): warps of a block, the neighbouring values of a
// thread, and the rows and columns of a block.
constexpr int kPassWarps = 8;
constexpr int kPassValues = 8;
constexpr int kPassRows = 64;
constexpr int kPassColumns = 32 * kPassValues;

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_SHARED_LIMITS_H_
