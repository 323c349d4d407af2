// Why this cannot hang, and why no data is overwritten early:
//
// - All waits of streams are for events that are recorded already. The hosts see to that by two
//   meetings: no device waits for a peer's copy before the peer has enqueued it. If a peer does not
//   come, the call fails on the hosts, after a limited time.
// - So every wait, like the order within a stream, points to work that was enqueued before. Such
//   waits cannot form a circle, whatever other programs the hosts enqueue in between, and in
//   whatever order on each device.
// - XLA's own collectives wait for work that other devices enqueue later. A circle through one of
//   them takes two programs that the devices run in different orders. Then the meeting fails: XLA
//   enqueues the programs of a device one after the other, so one device is in the meeting, and the
//   other one in the other program, before its collectives. A collective before each call, which
//   would lock the devices for the program, costs 20 to 50 us, and does not make orders agree.
// - A device enqueues its copies before the products that wait for the copies of others. Copies
//   wait only for this device's earlier work and for buffers of earlier calls. So the order of
//   enqueueing is an order in which all can run, even if all streams share one hardware queue
//   (CUDA_DEVICE_MAX_CONNECTIONS=1).
// - A copy into a peer's buffer waits for the peer's event `released`, which follows the last call
//   that used the buffer. The host of the peer recorded it before it joined this meeting.
// - XLA may reuse A, and the scratch, after the call. So XLA's stream waits for this device's own
//   copies, too, before the call ends.
// - The events of a slot are recorded again only in a later call, which takes the slot after all
//   peers have left this meeting, so after the last cudaStreamWaitEvent of this call.
// - A failed call keeps its slots for ever: peers may still write into them.

#include "overlap/overlapped.h"

#include <memory>

#include "dispatch/dispatch.h"
#include "overlap/endpoint.h"
#include "passes/sum_parts.h"

namespace jax_tcgemm {
namespace {

Status record(cudaEvent_t event, cudaStream_t stream) {
  JAX_TCGEMM_CUDA_CHECK(cudaEventRecord(event, stream), "an event");
  return Status();
}

Status wait(cudaStream_t stream, cudaEvent_t event) {
  JAX_TCGEMM_CUDA_CHECK(cudaStreamWaitEvent(stream, event, 0), "an event");
  return Status();
}

// Returns the problem of rows that begin `rows` further down in D, and in A if A has all rows.
GemmProblem moved_down(GemmProblem problem, int64_t rows, bool moves_a) {
  GemmParams& params = problem.params;
  if (moves_a) {
    const int64_t elements = rows * (problem.major_a == Major::kK ? params.a.ld : 1);
    params.a.data = static_cast<const char*>(params.a.data) +
                    elements * element_bytes(arithmetic_of(problem.algorithm).a);
  }
  EpilogueParams& epilogue = params.epilogue;
  for (Addend* const each : {&epilogue.c, &epilogue.c2, &epilogue.row_scale}) {
    if (each->data == nullptr) continue;
    each->data =
        static_cast<const char*>(each->data) + rows * each->stride_m * element_bytes(each->type);
  }
  const int64_t bytes = rows * params.n * element_bytes(epilogue.d_type);
  for (void** const each : {&epilogue.d, &epilogue.aux, &epilogue.aux2}) {
    if (*each != nullptr) *each = static_cast<char*>(*each) + bytes;
  }
  return problem;
}

// A device's part in a call.
class Visit {
 public:
  Visit(const Peers& peers, cudaStream_t stream) : peers_(peers), stream_(stream) {}
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;

  // Takes a slot and joins the meeting. If that fails, the peers need not wait for the time limit.
  Status begin(int64_t bytes, int ordinal) {
    const Status status = try_begin(bytes, ordinal);
    if (!status.ok() && meeting_ == nullptr)
      Meeting::refuse(peers_.key, peers_.count, peers_.signature, status);
    return status;
  }

  // Waits until all devices have joined, and sees to it that this device can write to their memory.
  Status meet() {
    JAX_TCGEMM_RETURN_IF_ERROR(meeting_->wait_for_guests());
    for (int rank = 0; rank < peers_.count; ++rank) {
      JAX_TCGEMM_RETURN_IF_ERROR(endpoint_->reach(slot_of(rank).endpoint->ordinal()));
    }
    return Status();
  }

  // Enqueues a copy to the buffer of another device, behind `source_ready`.
  Status send(int distance, const void* source, int64_t bytes, cudaEvent_t source_ready) {
    const int to = (peers_.rank + distance) % peers_.count;
    const cudaStream_t side = endpoint_->side_stream(distance - 1);
    const Slot& target = slot_of(to);
    JAX_TCGEMM_RETURN_IF_ERROR(wait(side, source_ready));
    JAX_TCGEMM_RETURN_IF_ERROR(wait(side, target.released));
    JAX_TCGEMM_CUDA_CHECK(cudaMemcpyAsync(target.buffer + peers_.rank * bytes, source, bytes,
                                          cudaMemcpyDefault, side),
                          "copying ", bytes, " bytes to device ", target.endpoint->ordinal());
    return record(own().copied[to], side);
  }

  // Makes XLA's stream wait for the copy from another device.
  Status receive(int from) { return wait(stream_, slot_of(from).copied[peers_.rank]); }

  // Makes XLA's stream wait for this device's own copies, and leaves the meeting. The last device
  // to leave gives the slots of all back.
  Status end() {
    for (int to = 0; to < peers_.count; ++to) {
      if (to != peers_.rank) JAX_TCGEMM_RETURN_IF_ERROR(wait(stream_, own().copied[to]));
    }
    JAX_TCGEMM_RETURN_IF_ERROR(record(own().released, stream_));
    if (meeting_->leave()) {
      for (int rank = 0; rank < peers_.count; ++rank) {
        Slot& slot = slot_of(rank);
        slot.endpoint->give_back(&slot);
      }
    }
    return Status();
  }

  // Passes a status on. An error makes the peers fail; what XLA does next waits for the copies that
  // this device has enqueued.
  Status checked(Status status) {
    if (status.ok()) return status;
    meeting_->fail(status);
    for (const cudaEvent_t event : own().copied) static_cast<void>(wait(stream_, event));
    return status;
  }

  Slot& own() const { return *slot_; }
  Meeting& meeting() const { return *meeting_; }

 private:
  Slot& slot_of(int rank) const { return *static_cast<Slot*>(meeting_->guest(rank)); }

  Status try_begin(int64_t bytes, int ordinal) {
    JAX_TCGEMM_RETURN_IF_ERROR(Endpoint::of_device(ordinal, &endpoint_));
    JAX_TCGEMM_RETURN_IF_ERROR(endpoint_->take(bytes, &slot_));
    // The slot's last call may have been on another stream.
    JAX_TCGEMM_RETURN_IF_ERROR(wait(stream_, own().released));
    JAX_TCGEMM_RETURN_IF_ERROR(record(own().ready, stream_));
    return Meeting::join(peers_.key, peers_.count, peers_.rank, peers_.signature, slot_, &meeting_);
  }

  const Peers& peers_;
  const cudaStream_t stream_;
  Endpoint* endpoint_ = nullptr;
  Slot* slot_ = nullptr;
  std::shared_ptr<Meeting> meeting_;
};

Status gather_and_multiply(const GemmProblem& part, int64_t shard_bytes, const Peers& peers,
                           Visit* visit, const DeviceProperties& device, cudaStream_t stream) {
  const int count = peers.count;
  JAX_TCGEMM_RETURN_IF_ERROR(visit->meet());
  for (int distance = 1; distance < count; ++distance) {
    JAX_TCGEMM_RETURN_IF_ERROR(
        visit->send(distance, part.params.a.data, shard_bytes, visit->own().ready));
  }
  visit->meeting().announce_copies();
  const int64_t rows = part.params.m;
  JAX_TCGEMM_RETURN_IF_ERROR(run_gemm(moved_down(part, peers.rank * rows, false), device, stream));
  JAX_TCGEMM_RETURN_IF_ERROR(visit->meeting().wait_for_copies());
  for (int distance = 1; distance < count; ++distance) {
    const int from = (peers.rank - distance + count) % count;
    JAX_TCGEMM_RETURN_IF_ERROR(visit->receive(from));
    GemmProblem other = moved_down(part, from * rows, false);
    other.params.a.data = visit->own().buffer + from * shard_bytes;
    JAX_TCGEMM_RETURN_IF_ERROR(run_gemm(other, device, stream));
  }
  return visit->end();
}

// Makes the problem add to the sum of the parts before it, unless it is the first, and write D only
// if it is the last.
GemmProblem part_of_sum(GemmProblem problem, float* sum, bool is_first, bool is_last) {
  EpilogueParams& epilogue = problem.params.epilogue;
  const int32_t n = problem.params.n;
  if (!is_first) {
    epilogue.c = {sum, n, 1, {}, ElementType::kF32, n % kVectorColumns == 0};
    epilogue.beta.value = 1.f;
    epilogue.role_of_c = RoleOfC::kAdd;
  }
  if (!is_last) {
    epilogue.d = sum;
    epilogue.d_type = ElementType::kF32;
  }
  return problem;
}

Status gather_and_sum(const GemmProblem& part, bool gathers_b, int64_t shard_bytes, float* sum,
                      const Peers& peers, Visit* visit, const DeviceProperties& device,
                      cudaStream_t stream) {
  const int count = peers.count;
  const Operand& shard = gathers_b ? part.params.b : part.params.a;
  JAX_TCGEMM_RETURN_IF_ERROR(visit->meet());
  for (int distance = 1; distance < count; ++distance) {
    JAX_TCGEMM_RETURN_IF_ERROR(visit->send(distance, shard.data, shard_bytes, visit->own().ready));
  }
  visit->meeting().announce_copies();
  for (int distance = 0; distance < count; ++distance) {
    const int from = (peers.rank - distance + count) % count;
    if (distance == 1) JAX_TCGEMM_RETURN_IF_ERROR(visit->meeting().wait_for_copies());
    if (distance > 0) JAX_TCGEMM_RETURN_IF_ERROR(visit->receive(from));
    GemmProblem problem = part_of_sum(part, sum, distance == 0, distance == count - 1);
    GemmParams& params = problem.params;
    Operand& gathered = gathers_b ? params.b : params.a;
    Operand& whole = gathers_b ? params.a : params.b;
    if (distance > 0) gathered.data = visit->own().buffer + from * shard_bytes;
    const Major major = gathers_b ? problem.major_a : problem.major_b;
    const int64_t k = int64_t{from} * params.k;
    const int bytes = element_bytes(problem.algorithm);
    whole.data =
        static_cast<const char*>(whole.data) + k * (major == Major::kK ? 1 : whole.ld) * bytes;
    JAX_TCGEMM_RETURN_IF_ERROR(run_gemm(problem, device, stream));
  }
  return visit->end();
}

Status multiply_and_scatter(const GemmProblem& part, char* scratch, const Peers& peers,
                            Visit* visit, const DeviceProperties& device, cudaStream_t stream) {
  const int count = peers.count;
  const int64_t rows = part.params.m, bytes = part_bytes(part);
  const auto multiply = [&](int rank, void* d) {
    GemmProblem problem = moved_down(part, rank * rows, true);
    problem.params.epilogue.d = d;
    return run_gemm(problem, device, stream);
  };
  for (int distance = 1; distance < count; ++distance) {
    const int to = (peers.rank + distance) % count;
    char* const d = scratch + (distance - 1) * bytes;
    JAX_TCGEMM_RETURN_IF_ERROR(multiply(to, d));
    JAX_TCGEMM_RETURN_IF_ERROR(record(visit->own().part[to], stream));
    if (distance == 1) JAX_TCGEMM_RETURN_IF_ERROR(visit->meet());
    JAX_TCGEMM_RETURN_IF_ERROR(visit->send(distance, d, bytes, visit->own().part[to]));
  }
  visit->meeting().announce_copies();
  JAX_TCGEMM_RETURN_IF_ERROR(multiply(peers.rank, visit->own().buffer + peers.rank * bytes));
  JAX_TCGEMM_RETURN_IF_ERROR(visit->meeting().wait_for_copies());
  for (int from = 0; from < count; ++from) {
    if (from != peers.rank) JAX_TCGEMM_RETURN_IF_ERROR(visit->receive(from));
  }
  const EpilogueParams& epilogue = part.params.epilogue;
  JAX_TCGEMM_CUDA_CHECK(launch_sum_parts(visit->own().buffer, count, rows * part.params.n,
                                         epilogue.d_type, epilogue.d, stream),
                        "adding ", count, " parts of m=", rows, " n=", part.params.n);
  return visit->end();
}

}  // namespace

int64_t part_bytes(const GemmProblem& part) {
  return int64_t{part.params.m} * part.params.n * element_bytes(part.params.epilogue.d_type);
}

Status run_gathered(const GemmProblem& part, int64_t shard_bytes, const Peers& peers,
                    const DeviceProperties& device, cudaStream_t stream) {
  Visit visit(peers, stream);
  JAX_TCGEMM_RETURN_IF_ERROR(visit.begin(peers.count * shard_bytes, device.ordinal));
  return visit.checked(gather_and_multiply(part, shard_bytes, peers, &visit, device, stream));
}

Status run_gathered_sum(const GemmProblem& part, bool gathers_b, int64_t shard_bytes, float* sum,
                        const Peers& peers, const DeviceProperties& device, cudaStream_t stream) {
  Visit visit(peers, stream);
  JAX_TCGEMM_RETURN_IF_ERROR(visit.begin(peers.count * shard_bytes, device.ordinal));
  return visit.checked(
      gather_and_sum(part, gathers_b, shard_bytes, sum, peers, &visit, device, stream));
}

Status run_scattered(const GemmProblem& part, void* scratch, const Peers& peers,
                     const DeviceProperties& device, cudaStream_t stream) {
  Visit visit(peers, stream);
  JAX_TCGEMM_RETURN_IF_ERROR(visit.begin(peers.count * part_bytes(part), device.ordinal));
  return visit.checked(
      multiply_and_scatter(part, static_cast<char*>(scratch), peers, &visit, device, stream));
}

}  // namespace jax_tcgemm
