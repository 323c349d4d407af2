// Three loops, the outer two of which are the grid: a thread computes one element of D.
//
// Neighbouring threads take neighbouring rows. So the 32 loads of A by a warp lie k elements apart,
// each in a line of its own, of which it wants 4 bytes; and so do its stores.
//
// Ceiling: lines that go to and fro between L2 and the SMs.

#include "ladder.h"

namespace ladder {
namespace {

constexpr int kRows = 32;
constexpr int kColumns = 8;

template <typename T>
__global__ void kernel(Product<T> p) {
  const int row = blockIdx.x * kRows + threadIdx.x;
  const int column = blockIdx.y * kColumns + threadIdx.y;
  float sum = 0.f;
  for (int i = 0; i < p.k; ++i) {
    sum += float(p.a[size_t(row) * p.k + i]) * float(p.b[size_t(i) * p.n + column]);
  }
  p.d[size_t(row) * p.n + column] = T(sum);
}

}  // namespace

template <typename T>
cudaError_t naive(const Product<T>& p) {
  kernel<<<dim3(p.m / kRows, p.n / kColumns), dim3(kRows, kColumns), 0, p.stream>>>(p);
  return cudaGetLastError();
}

LADDER_INSTANTIATE(naive)

}  // namespace ladder
