// Algorithms by their jax.lax.DotAlgorithmPreset names.

#ifndef JAX_TCGEMM_FFI_ALGORITHM_NAMES_H_
#define JAX_TCGEMM_FFI_ALGORITHM_NAMES_H_

#include <optional>
#include <string_view>

#include "kernel_config.h"

namespace jax_tcgemm {

inline std::optional<Algorithm> algorithm_from_name(std::string_view name) {
  if (name == "BF16_BF16_F32") return Algorithm::kBf16Bf16F32;
  if (name == "F16_F16_F32") return Algorithm::kF16F16F32;
  if (name == "F16_F16_F16") return Algorithm::kF16F16F16;
  if (name == "TF32_TF32_F32") return Algorithm::kTf32Tf32F32;
  return std::nullopt;
}

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_FFI_ALGORITHM_NAMES_H_
