// The parameters of sm80/direct_kernel.cuh for alpha * A * B + bias.

#ifndef JAX_TCGEMM_SM80_DIRECT_PARAMS_H_
#define JAX_TCGEMM_SM80_DIRECT_PARAMS_H_

#include <stdint.h>

#include "arithmetic.h"
#include "gemm_params.h"

namespace jax_tcgemm::sm80 {

struct DirectParams {
  const void* a;
  const void* b;
  void* d;
  int64_t ld_a, ld_b;        // elements
  int64_t batch_a, batch_b;  // elements from one matrix to the next
  int32_t m, n, k;
  float alpha;
  ElementType d_type;
  bool d_vectorizable;
  Addend bias;
};

}  // namespace jax_tcgemm::sm80

#endif  // JAX_TCGEMM_SM80_DIRECT_PARAMS_H_
