// Division of 31-bit numbers by a number that the host knows, as a multiplication and a shift.
//
// Source: T. Granlund and P. L. Montgomery, "Division by invariant integers using multiplication",
// PLDI 1994, theorem 4.2. With 2^(s-1) < d <= 2^s and m = ceil(2^(31+s) / d), floor(x / d) =
// floor(m * x / 2^(31+s)) for all 0 <= x < 2^31.

#ifndef JAX_TCGEMM_COMMON_FAST_DIVISOR_H_
#define JAX_TCGEMM_COMMON_FAST_DIVISOR_H_

#include <stdint.h>

#ifdef __CUDACC__
#define JAX_TCGEMM_HOST_DEVICE __host__ __device__
#else
#define JAX_TCGEMM_HOST_DEVICE
#endif

namespace jax_tcgemm {

struct FastDivisor {
  int32_t divisor;      // 1 .. 2^31 - 1
  uint32_t multiplier;  // fits: m < 2^32
  uint32_t shift;       // s

  JAX_TCGEMM_HOST_DEVICE int32_t divide(int32_t x) const {
    return static_cast<int32_t>(static_cast<uint64_t>(x) * multiplier >> 31 >> shift);
  }
};

inline FastDivisor make_fast_divisor(int32_t divisor) {
  uint32_t shift = 0;
  while ((int64_t{1} << shift) < divisor) ++shift;
  const uint64_t numerator = uint64_t{1} << (31 + shift);
  return {divisor, static_cast<uint32_t>((numerator + divisor - 1) / divisor), shift};
}

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_COMMON_FAST_DIVISOR_H_
