// Products over parts of k.

#ifndef JAX_TCGEMM_DISPATCH_PARTS_H_
#define JAX_TCGEMM_DISPATCH_PARTS_H_

#include "gemm_params.h"
#include "kernel_config.h"

namespace jax_tcgemm {

// The parts are equal except for the last one, and none is empty.
struct Parts {
  int count;
  int stages;  // of a part, each tile_k long
};

// Divides k into at most `splits` parts.
Parts parts_of_k(int k, const KernelConfig& config, int splits);

// Sets parameters of a kernel whose blocks add up the parts (sm90/split_k/in_workspace.cuh).
void add_up_in_workspace(const Parts& parts, void* workspace, GemmParams* params);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_DISPATCH_PARTS_H_
