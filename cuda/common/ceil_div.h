// Division that rounds up.

#ifndef JAX_TCGEMM_COMMON_CEIL_DIV_H_
#define JAX_TCGEMM_COMMON_CEIL_DIV_H_

#include <stdint.h>

namespace jax_tcgemm {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_COMMON_CEIL_DIV_H_
