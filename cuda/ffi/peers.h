// The devices of an overlapped call, as its attributes and operands name them.

#ifndef JAX_TCGEMM_FFI_PEERS_H_
#define JAX_TCGEMM_FFI_PEERS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/status.h"
#include "ffi/attributes.h"
#include "overlap/overlapped.h"

namespace jax_tcgemm {

// Set by jax_tcgemm/lowering/overlapped.py.
struct PeersAttributes {
  int64_t call;        // no other call of any compiled program has this number
  int64_t group_size;  // devices of a group
  Strides devices;     // numbers of the devices of each group, by rank
};

// Returns a number that differs for calls of other extents or another kind.
int64_t signature_of(int64_t m, int64_t n, int64_t k, int kind);

// Finds the group of a device and its rank there. The last operand is the number of the device in
// its program.
//
// Args: `signature` is the same for all devices of the call.
Status decode_peers(const PeersAttributes& at, ffi::RemainingArgs& operands, int64_t signature,
                    int64_t run, int32_t ordinal, cudaStream_t stream, Peers* peers);

// Counts an executable that has this call. XLA instantiates a call once for each executable that it
// makes or loads.
void count_executable(int64_t call);

// Returns an error if somebody captures the stream into a CUDA graph.
Status check_uncaptured(cudaStream_t stream);

// Reads the buffer of gathered rows and the rows of this device, which are the last operand but
// one.
//
// Args: `index` is the operand of the buffer, `divided` the number of rows of all devices, `length`
// their elements. `row_stride` and `column_stride` are the strides of the operand.
Status decode_rows(const PeersAttributes& at, ffi::RemainingArgs& operands, size_t index,
                   int64_t divided, int64_t length, int64_t row_stride, int64_t column_stride,
                   GatheredRows* rows);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_FFI_PEERS_H_
