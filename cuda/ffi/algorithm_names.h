// Finds algorithms by their names in jax_tcgemm/kernels/arithmetic.py.

#ifndef JAX_TCGEMM_FFI_ALGORITHM_NAMES_H_
#define JAX_TCGEMM_FFI_ALGORITHM_NAMES_H_

#include <optional>
#include <string_view>

#include "arithmetic.h"

namespace jax_tcgemm {

inline std::optional<Algorithm> algorithm_from_name(std::string_view name) {
#define JAX_TCGEMM_MATCH(Name, kName, ...) \
  if (name == kName) return Algorithm::Name;
  JAX_TCGEMM_ALGORITHMS(JAX_TCGEMM_MATCH)
#undef JAX_TCGEMM_MATCH
  return std::nullopt;
}

// Returns the product of planes with this name, or null if there is none.
inline const PlaneProduct* plane_product_from_name(std::string_view name) {
  for (const PlaneProduct& product : kPlaneProducts) {
    if (name == product.name) return &product;
  }
  return nullptr;
}

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_FFI_ALGORITHM_NAMES_H_
