// Products over several devices of one process whose transfers run beside them.
//
// Each device pushes data to its peers by copy engines, on side streams; the product is launched in
// parts, one for each device, that wait for events. No kernel waits for another device, so a call
// needs no SMs for its transfers and cannot hold up a collective.

#ifndef JAX_TCGEMM_OVERLAP_OVERLAPPED_H_
#define JAX_TCGEMM_OVERLAP_OVERLAPPED_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>

#include "common/status.h"
#include "dispatch/device.h"
#include "gemm_problem.h"
#include "overlap/gathers.h"
#include "overlap/meeting.h"

namespace jax_tcgemm {

// The devices among which the rows are divided, and the place of this device.
struct Peers {
  MeetingKey key;
  int count;
  int rank;
  int64_t signature;  // of the call: devices with different signatures do not meet
};

// A product of gathered rows, as functions that enqueue it.
struct GatheredProduct {
  std::function<Status()> multiply;  // of the buffer with all rows
  // Computes the rows of the result for a rank, whose rows of A are at `a`. Absent if the gathered
  // rows lie along k.
  std::function<Status(int rank, const void* a)> multiply_part;
};

// Returns the problem of the rows of a rank.
GemmProblem part_of_rows(const GemmProblem& whole, int rank, int count, const void* a);

// Computes a product of gathered rows: A has them as its rows, or A or B has them along k.
//
// If the rows are gathered already, this is an ordinary product. Else the product of A's rows runs
// in parts, beside the copies:
//
//   side stream d   | wait: A is there, the peer's buffer is free | copy A to rank + d | event
//   XLA's stream    | product of own rows | wait for the copy of rank - 1 | product | ...
//
// A product along k waits for all copies.
Status run_gathered(const GatheredProduct& product, const GatheredRows& rows, const Peers& peers,
                    const DeviceProperties& device, cudaStream_t stream);

// Computes this device's rows of the sum of all devices' products, or all rows. `part` is the
// problem of `part.params.m` rows: A are the first rows of the whole, and D the rows of this
// device.
//
//   XLA's stream    | product for rank + 1 | ... | product of own rows | wait for copies | sum
//   side stream d   | wait: product for rank + d, the peer's buffer is free | copy to rank + d
//
// Each part is rounded to D's type; the sum is in float32, in the order of ranks. `scratch` has
// room for the parts of all peers. `sums` is null, or has room for all rows: then the devices send
// their sums to one another, too, and D is not used.
Status run_scattered(const GemmProblem& part, void* scratch, void* sums, const Peers& peers,
                     const DeviceProperties& device, cudaStream_t stream);

// Returns the bytes of a part of D.
int64_t part_bytes(const GemmProblem& part);

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_OVERLAP_OVERLAPPED_H_
