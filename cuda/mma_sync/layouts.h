// The parameter of mma.sync kernels besides those of the product.

#ifndef JAX_TCGEMM_MMA_SYNC_LAYOUTS_H_
#define JAX_TCGEMM_MMA_SYNC_LAYOUTS_H_

#include "kernel_config.h"

namespace jax_tcgemm::mma_sync {

struct Layouts {
  Major a, b;
};

}  // namespace jax_tcgemm::mma_sync

#endif  // JAX_TCGEMM_MMA_SYNC_LAYOUTS_H_
