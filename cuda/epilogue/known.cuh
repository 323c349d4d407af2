// Facts about the epilogue that a kernel knows at compile time. A prebuilt kernel has code for any
// epilogue and reads the parameters. A kernel that is compiled at run time has one epilogue;
// dispatch/run_time_row.cc defines its constants.

#pragma once

#include "gemm_params.h"

namespace jax_tcgemm {

__device__ __forceinline__ Activation known_activation(const EpilogueParams& epilogue) {
#ifdef JAX_TCGEMM_KNOWN_ACTIVATION
  return static_cast<Activation>(JAX_TCGEMM_KNOWN_ACTIVATION);
#else
  return epilogue.activation;
#endif
}

__device__ __forceinline__ RoleOfC known_role_of_c(const EpilogueParams& epilogue) {
#ifdef JAX_TCGEMM_KNOWN_ROLE_OF_C
  return static_cast<RoleOfC>(JAX_TCGEMM_KNOWN_ROLE_OF_C);
#else
  return epilogue.role_of_c;
#endif
}

__device__ __forceinline__ ElementType known_d_type(const EpilogueParams& epilogue) {
#ifdef JAX_TCGEMM_KNOWN_D_TYPE
  return static_cast<ElementType>(JAX_TCGEMM_KNOWN_D_TYPE);
#else
  return epilogue.d_type;
#endif
}

// Returns the Finish of an sm90 kernel; `finish` is the parameters' value.
template <typename Finish>
__device__ __forceinline__ Finish known_finish(Finish finish) {
#ifdef JAX_TCGEMM_KNOWN_FINISH
  return static_cast<Finish>(JAX_TCGEMM_KNOWN_FINISH);
#else
  return finish;
#endif
}

}  // namespace jax_tcgemm
