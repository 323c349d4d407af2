// Products over several devices of one process whose transfers run beside them.
//
// Each device pushes data to its peers by copy engines, on side streams; the product is launched in
// parts, one for each device, that wait for events. No kernel waits for another device, so a call
// needs no SMs for its transfers and cannot hold up a collective.

#ifndef JAX_TCGEMM_OVERLAP_OVERLAPPED_H_
#define JAX_TCGEMM_OVERLAP_OVERLAPPED_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/status.h"
#include "dispatch/device.h"
#include "gemm_problem.h"
#include "overlap/meeting.h"

namespace jax_tcgemm {

// The devices among which the rows are divided, and the place of this device.
struct Peers {
  MeetingKey key;
  int count;
  int rank;
  int64_t signature;  // of the call: devices with different signatures do not meet
};

// Computes the product of all rows. `part` is the problem of `part.params.m` rows: A is this
// device's shard, and everything else are the first rows of the whole.
//
//   side stream d   | wait: A is there, the peer's buffer is free | copy A to rank + d | event
//   XLA's stream    | product of own rows | wait for the copy of rank - 1 | product | ...
//
// Args: `shard_bytes` is the size of A, which is dense.
Status run_gathered(const GemmProblem& part, int64_t shard_bytes, const Peers& peers,
                    const DeviceProperties& device, cudaStream_t stream);

// Computes this device's rows of the sum of all devices' products. `part` is the problem of
// `part.params.m` rows: A are the first rows of the whole, and D the rows of this device.
//
//   XLA's stream    | product for rank + 1 | ... | product of own rows | wait for copies | sum
//   side stream d   | wait: product for rank + d, the peer's buffer is free | copy to rank + d
//
// Each part is rounded to D's type; the sum is in float32, in the order of ranks. `scratch` has
// room for the parts of all peers.
Status run_scattered(const GemmProblem& part, void* scratch, const Peers& peers,
                     const DeviceProperties& device, cudaStream_t stream);

// Computes the product over all of k, of which this device has a part of A or B. `part` is the
// problem of `part.params.k`: one operand is this device's shard, the other one begins the whole.
// `sum` has room for D in float32: each part adds to it, and the last one writes D.
Status run_gathered_sum(const GemmProblem& part, bool gathers_b, int64_t shard_bytes, float* sum,
                        const Peers& peers, const DeviceProperties& device, cudaStream_t stream);

// Returns the bytes of a part of D.
int64_t part_bytes(const GemmProblem& part);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_OVERLAP_OVERLAPPED_H_
