// New: neighbouring threads compute neighbouring columns.
//
// A warp's 32 loads of B now form one piece of a row, and so do its stores. Its loads of A all read
// the same element, which one line serves. The only change is which index is threadIdx.x.
//
// Ceiling: loads. Each multiplication needs two loads, and L1 serves one load of a warp a cycle.

#include "ladder.h"

namespace ladder {
namespace {

constexpr int kRows = 8;
constexpr int kColumns = 32;

template <typename T>
__global__ void kernel(Product<T> p) {
  const int row = blockIdx.y * kRows + threadIdx.y;
  const int column = blockIdx.x * kColumns + threadIdx.x;
  float sum = 0.f;
  for (int i = 0; i < p.k; ++i) {
    sum += float(p.a[size_t(row) * p.k + i]) * float(p.b[size_t(i) * p.n + column]);
  }
  p.d[size_t(row) * p.n + column] = T(sum);
}

}  // namespace

template <typename T>
cudaError_t coalesced(const Product<T>& p) {
  kernel<<<dim3(p.n / kColumns, p.m / kRows), dim3(kColumns, kRows), 0, p.stream>>>(p);
  return cudaGetLastError();
}

LADDER_INSTANTIATE(coalesced)

}  // namespace ladder
