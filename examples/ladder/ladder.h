// The product that every rung computes, and the list of rungs.

#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

namespace ladder {

// D = A B of row-major matrices in device memory: A (m, k), B (k, n), D (m, n). Sums are float32.
// Extents are multiples of 128, so that no rung handles edges; the package's kernels do.
template <typename T>
struct Product {
  const T* a;
  const T* b;
  T* d;
  int m, n, k;
  cudaStream_t stream;
};

constexpr int kUnit = 128;

// Each rung is a file with a function that launches its kernel for float and for __nv_bfloat16.
#define LADDER_RUNGS(X) \
  X(naive)              \
  X(coalesced)          \
  X(shared_tile)        \
  X(register_tile)      \
  X(vectors)            \
  X(swizzle)            \
  X(mma_sync)           \
  X(cp_async)           \
  X(tma_wgmma)

#define LADDER_DECLARE(name) \
  template <typename T>      \
  cudaError_t name(const Product<T>& p);
LADDER_RUNGS(LADDER_DECLARE)
#undef LADDER_DECLARE

#define LADDER_INSTANTIATE(name)                      \
  template cudaError_t name(const Product<float>& p); \
  template cudaError_t name(const Product<__nv_bfloat16>& p);

}  // namespace ladder
