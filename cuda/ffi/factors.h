// Decodes the factors of a product: their element types, layouts and alignment.

#ifndef JAX_TCGEMM_FFI_FACTORS_H_
#define JAX_TCGEMM_FFI_FACTORS_H_

#include <optional>

#include "common/status.h"
#include "dispatch/dispatch.h"
#include "ffi/attributes.h"
#include "ffi/buffers.h"

namespace jax_tcgemm {

// Checks the element types of A, B and D.
Status check_types(const GemmProblem& problem, const Buffer& a, const Buffer& b);

// Reads the layouts of A and B.
Status decode_factors(const GemmAttributes& attributes, const Buffer& a, const Buffer& b,
                      GemmProblem* problem);

// Reads the second weight of a gated product: a buffer of its own, or a part of b's.
Status decode_second_weight(const GemmAttributes& attributes, const Buffer& b,
                            const std::optional<Buffer>& b2, GemmProblem* problem);

// Reads the layouts of A and B before their addresses are known. It takes the addresses for
// multiples of 16 bytes, as XLA's are.
Status decode_layouts(const GemmAttributes& attributes, GemmProblem* problem);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_FFI_FACTORS_H_
