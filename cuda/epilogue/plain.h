// Whether there is an epilogue at all.

#ifndef JAX_TCGEMM_EPILOGUE_PLAIN_H_
#define JAX_TCGEMM_EPILOGUE_PLAIN_H_

#include "gemm_params.h"

namespace jax_tcgemm {

// Whether D is the product, rounded, and the only result.
inline bool is_plain(const EpilogueParams& epilogue) {
  return epilogue.alpha.data == nullptr && epilogue.alpha.value == 1.f &&
         epilogue.c.data == nullptr && epilogue.bias.data == nullptr && epilogue.aux == nullptr &&
         epilogue.row_scale.data == nullptr && epilogue.column_scale.data == nullptr &&
         epilogue.activation == Activation::kNone && !epilogue.gated;
}

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_EPILOGUE_PLAIN_H_
