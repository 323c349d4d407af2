// What an sm80 kernel is given beside the parameters of the product.

#ifndef JAX_TCGEMM_SM80_LAYOUTS_H_
#define JAX_TCGEMM_SM80_LAYOUTS_H_

#include "kernel_config.h"

namespace jax_tcgemm::sm80 {

struct Layouts {
  Major a, b;
};

}  // namespace jax_tcgemm::sm80

#endif  // JAX_TCGEMM_SM80_LAYOUTS_H_
