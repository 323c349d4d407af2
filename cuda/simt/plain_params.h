// The parameters of simt/plain_kernel.cuh.

#ifndef JAX_TCGEMM_SIMT_PLAIN_PARAMS_H_
#define JAX_TCGEMM_SIMT_PLAIN_PARAMS_H_

#include <stdint.h>

#include "arithmetic.h"

namespace jax_tcgemm::simt {

struct PlainParams {
  const void* a;
  const void* b;
  void* d;
  int64_t ld_a, ld_b;
  int32_t m, n, k;
  ElementType d_type;
};

}  // namespace jax_tcgemm::simt

#endif  // JAX_TCGEMM_SIMT_PLAIN_PARAMS_H_
