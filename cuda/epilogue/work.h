// How much work an epilogue does.

#ifndef JAX_TCGEMM_EPILOGUE_WORK_H_
#define JAX_TCGEMM_EPILOGUE_WORK_H_

#include "gemm_params.h"
#include "kernel_config.h"

namespace jax_tcgemm {

// Returns true if D is the rounded product and the only result.
inline bool is_plain(const EpilogueParams& epilogue) {
  return epilogue.alpha.data == nullptr && epilogue.alpha.value == 1.f &&
         epilogue.c.data == nullptr && epilogue.bias.data == nullptr && epilogue.aux == nullptr &&
         epilogue.row_scale.data == nullptr && epilogue.column_scale.data == nullptr &&
         epilogue.activation == Activation::kNone && !epilogue.gated;
}

inline EpilogueWork work_of(const EpilogueParams& epilogue) {
  if (is_plain(epilogue)) return EpilogueWork::kNone;
  const bool is_sum = epilogue.activation == Activation::kNone && !epilogue.gated &&
                      epilogue.aux == nullptr && epilogue.row_scale.data == nullptr &&
                      epilogue.column_scale.data == nullptr &&
                      (epilogue.c.data == nullptr || epilogue.role_of_c == RoleOfC::kAdd ||
                       epilogue.role_of_c == RoleOfC::kResidual);
  return is_sum ? EpilogueWork::kSum : EpilogueWork::kAny;
}

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_EPILOGUE_WORK_H_
