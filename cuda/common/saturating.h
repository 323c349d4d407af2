// Counts of elements and bytes, from extents and strides of any caller. They saturate at the
// largest number instead of wrapping; no buffer has so many elements.

#ifndef JAX_TCGEMM_COMMON_SATURATING_H_
#define JAX_TCGEMM_COMMON_SATURATING_H_

#include <stdint.h>

namespace jax_tcgemm {

// Like std::add_sat and std::mul_sat of C++26, for numbers that are not negative.
constexpr int64_t add_sat(int64_t a, int64_t b) {
  int64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? INT64_MAX : sum;
}

constexpr int64_t mul_sat(int64_t a, int64_t b) {
  int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? INT64_MAX : product;
}

// Counts elements from the first to the end of the last addressed one; 0 if an extent is 0.
class AddressedSpan {
 public:
  constexpr void add_dimension(int64_t extent, int64_t stride) {
    is_empty_ |= extent == 0;
    if (extent > 0) last_ = add_sat(last_, mul_sat(extent - 1, stride));
  }
  constexpr int64_t elements() const { return is_empty_ ? 0 : add_sat(last_, 1); }

 private:
  int64_t last_ = 0;
  bool is_empty_ = false;
};

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_COMMON_SATURATING_H_
