// Three loops. The grid is the outer two: a thread computes one element of D.
//
// Neighbouring threads compute neighbouring rows. The 32 loads of A by a warp therefore lie k
// elements apart. Each load fetches a line of its own and uses 4 bytes of it. The same holds for
// the stores.
//
// Ceiling: traffic of lines between L2 and the SMs.

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
