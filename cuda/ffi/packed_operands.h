// Decodes what the custom calls for packed weights have in common.

#ifndef JAX_TCGEMM_FFI_PACKED_OPERANDS_H_
#define JAX_TCGEMM_FFI_PACKED_OPERANDS_H_

#include <cstdint>
#include <string_view>

#include "common/status.h"
#include "dispatch/packed.h"
#include "ffi/attributes.h"
#include "packed_config.h"

namespace jax_tcgemm {

// Set by jax_tcgemm/lowering/packed.py.
struct PackedAttributes {
  int64_t batch;  // for groups of rows, the number of weights
  int64_t m, n, k;
  int64_t group;                 // rows of the weight that share a scale
  bool has_zeros, weights_move;  // along the batch
  int64_t tokens, row_blocks, k_blocks, stages, split_k, blocks_on_sm;
  std::string_view format, activation, scale, output, digest;
};

// How the call uses its weights.
struct PackedUse {
  bool is_ragged;
  int weights;
};

// Decodes the configuration of the kernel and checks it.
Status decode_packed_config(const PackedAttributes& at, const PackedUse& use, PackedConfig* config);

// Decodes a product without its result: checks all extents, x and the first weight.
Status decode_packed(const PackedAttributes& at, const PackedUse& use, ffi::AnyBuffer x,
                     ffi::AnyBuffer values, ffi::AnyBuffer scales, PackedProblem* problem);

// Checks the buffers of one weight of a product whose extents were checked.
Status check_packed_weight(const PackedAttributes& at, const PackedConfig& config,
                           ffi::AnyBuffer values, ffi::AnyBuffer scales);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_FFI_PACKED_OPERANDS_H_
