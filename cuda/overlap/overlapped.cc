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
// - A copy into memory of XLA's at a peer waits for the peer's event `ready`, and the peer's stream
//   waits for the copy before the call ends. If the call fails, no device enqueues such copies any
//   more, and the hosts wait for those that are enqueued.
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

Status copy(void* to, const void* from, int64_t bytes, cudaStream_t stream) {
  JAX_TCGEMM_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "copying ",
                        bytes, " bytes");
  return Status();
}

// Returns the problem of rows that begin `rows` further down in A and in the results.
GemmProblem moved_down(GemmProblem problem, int64_t rows) {
  GemmParams& params = problem.params;
  const int64_t elements = rows * (problem.major_a == Major::kK ? params.a.ld : 1);
  params.a.data = static_cast<const char*>(params.a.data) +
                  elements * element_bytes(arithmetic_of(problem.algorithm).a);
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
  //
  // Args: `sent_bytes` are those of a copy to a peer, `bytes` those of the parts that peers send
  // for this call alone. `target` is memory of XLA's for `target_bytes` that stay; null if there
  // are none.
  Status begin(int ordinal, int64_t sent_bytes, int64_t bytes, void* target, int64_t target_bytes) {
    target_ = static_cast<char*>(target);
    const Status status = try_begin(ordinal, sent_bytes, bytes, target_bytes);
    if (!status.ok() && meeting_ == nullptr)
      Meeting::refuse(peers_.key, peers_.count, peers_.signature, status);
    return status;
  }

  // Waits until all devices have joined, and sees to it that this device can write to their memory.
  Status meet() {
    JAX_TCGEMM_RETURN_IF_ERROR(meeting_->wait_for_guests());
    for (int rank = 0; rank < peers_.count; ++rank) {
      const Slot& slot = slot_of(rank);
      JAX_TCGEMM_REQUIRE(slot.sent_bytes == own().sent_bytes, "devices send ", slot.sent_bytes,
                         " and ", own().sent_bytes, " bytes");
      JAX_TCGEMM_RETURN_IF_ERROR(endpoint_->reach(slot.endpoint->ordinal()));
    }
    return Status();
  }

  // Enqueues copies of this device's rows to the targets of all others, behind `source_ready`.
  Status send_to_targets(int round, const void* source, int64_t bytes, cudaEvent_t source_ready) {
    for (int distance = 1; distance < peers_.count; ++distance) {
      const Slot& slot = slot_of(rank_at(distance));
      JAX_TCGEMM_RETURN_IF_ERROR(wait(endpoint_->side_stream(distance - 1), slot.ready));
      JAX_TCGEMM_RETURN_IF_ERROR(send(round, distance, slot.target, source, bytes, source_ready));
    }
    meeting_->announce_copies(round);
    return Status();
  }

  // Enqueues a copy to the buffer of another device.
  Status send_to_buffer(int distance, const void* source, int64_t bytes, cudaEvent_t source_ready) {
    return send(0, distance, slot_of(rank_at(distance)).buffer, source, bytes, source_ready);
  }

  // Makes XLA's stream wait for the copy from another device.
  Status receive(int round, int from) {
    return wait(stream_, slot_of(from).copied[round][peers_.rank]);
  }

  // The same for a copy to the target.
  Status receive_in_target(int round, int from, int64_t bytes) {
    JAX_TCGEMM_RETURN_IF_ERROR(receive(round, from));
    if (own().target == target_) return Status();
    const int64_t offset = from * bytes;
    return copy(target_ + offset, own().target + offset, bytes, stream_);
  }

  // Makes XLA's stream wait for this device's own copies, and leaves the meeting. The last device
  // to leave gives the slots of all back.
  Status end(int rounds) {
    for (int round = 0; round < rounds; ++round) {
      for (int to = 0; to < peers_.count; ++to) {
        if (to != peers_.rank) JAX_TCGEMM_RETURN_IF_ERROR(wait(stream_, own().copied[round][to]));
      }
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

  // Passes a status on. An error makes the peers fail. XLA may reuse its memory after that, so this
  // device's stream waits for its own copies, and its host for those of the peers.
  Status checked(Status status) {
    if (status.ok()) return status;
    meeting_->fail(status);
    for (const Slot::Events& events : own().copied) {
      for (const cudaEvent_t event : events) static_cast<void>(wait(stream_, event));
    }
    for (int rank = 0; rank < peers_.count && own().target != nullptr; ++rank) {
      const auto* const slot = static_cast<Slot*>(meeting_->guest(rank));
      if (slot != nullptr) slot->endpoint->wait_for_copies();
    }
    return status;
  }

  Slot& own() const { return *slot_; }
  Meeting& meeting() const { return *meeting_; }
  // Returns the device that this one sends to over a distance.
  int rank_at(int distance) const { return (peers_.rank + distance) % peers_.count; }

 private:
  Slot& slot_of(int rank) const { return *static_cast<Slot*>(meeting_->guest(rank)); }

  Status try_begin(int ordinal, int64_t sent_bytes, int64_t bytes, int64_t target_bytes) {
    JAX_TCGEMM_RETURN_IF_ERROR(Endpoint::of_device(ordinal, &endpoint_));
    const bool uses_buffer = target_ != nullptr && !is_reachable(target_);
    JAX_TCGEMM_RETURN_IF_ERROR(endpoint_->take(bytes + (uses_buffer ? target_bytes : 0), &slot_));
    own().sent_bytes = sent_bytes;
    own().target = uses_buffer ? own().buffer + bytes : target_;
    // The slot's last call may have been on another stream.
    JAX_TCGEMM_RETURN_IF_ERROR(wait(stream_, own().released));
    JAX_TCGEMM_RETURN_IF_ERROR(record(own().ready, stream_));
    const Status joined =
        Meeting::join(peers_.key, peers_.count, peers_.rank, peers_.signature, slot_, &meeting_);
    if (!joined.ok()) endpoint_->give_back(slot_);  // no peer has seen it
    return joined;
  }

  // Copies to the part of this device in memory of another one.
  Status send(int round, int distance, char* memory, const void* source, int64_t bytes,
              cudaEvent_t source_ready) {
    const int to = rank_at(distance);
    const cudaStream_t side = endpoint_->side_stream(distance - 1);
    return meeting_->enqueue_copy([&] {
      JAX_TCGEMM_RETURN_IF_ERROR(wait(side, source_ready));
      JAX_TCGEMM_RETURN_IF_ERROR(wait(side, slot_of(to).released));
      JAX_TCGEMM_RETURN_IF_ERROR(copy(memory + peers_.rank * bytes, source, bytes, side));
      return record(own().copied[round][to], side);
    });
  }

  const Peers& peers_;
  const cudaStream_t stream_;
  char* target_ = nullptr;
  Endpoint* endpoint_ = nullptr;
  Slot* slot_ = nullptr;
  std::shared_ptr<Meeting> meeting_;
};

// Fills the rows of the other devices in. If the product's rows are divided, it is computed in
// parts meanwhile.
Status gather(const GatheredProduct& product, const GatheredRows& rows, const Peers& peers,
              Visit* visit) {
  const int count = peers.count;
  const auto multiply = [&](int rank, const void* a) {
    return product.multiply_part ? product.multiply_part(rank, a) : Status();
  };
  // The product of the own rows needs no other device. It is enqueued first, so that the device
  // works while the hosts meet.
  JAX_TCGEMM_RETURN_IF_ERROR(multiply(peers.rank, rows.shard));
  JAX_TCGEMM_RETURN_IF_ERROR(visit->meet());
  JAX_TCGEMM_RETURN_IF_ERROR(
      visit->send_to_targets(0, rows.shard, rows.shard_bytes, visit->own().ready));
  JAX_TCGEMM_RETURN_IF_ERROR(visit->meeting().wait_for_copies(0));
  for (int distance = 1; distance < count; ++distance) {
    const int from = (peers.rank - distance + count) % count;
    JAX_TCGEMM_RETURN_IF_ERROR(visit->receive_in_target(0, from, rows.shard_bytes));
    JAX_TCGEMM_RETURN_IF_ERROR(multiply(from, rows.rows + from * rows.shard_bytes));
  }
  return visit->end(1);
}

Status multiply_and_scatter(const GemmProblem& part, char* scratch, char* sums, const Peers& peers,
                            Visit* visit, const DeviceProperties& device, cudaStream_t stream) {
  const int count = peers.count;
  const int64_t rows = part.params.m, bytes = part_bytes(part);
  const auto multiply = [&](int rank, void* d) {
    GemmProblem problem = moved_down(part, rank * rows);
    problem.params.epilogue.d = d;
    return run_gemm(problem, device, stream);
  };
  for (int distance = 1; distance < count; ++distance) {
    const int to = visit->rank_at(distance);
    char* const d = scratch + (distance - 1) * bytes;
    JAX_TCGEMM_RETURN_IF_ERROR(multiply(to, d));
    JAX_TCGEMM_RETURN_IF_ERROR(record(visit->own().part[to], stream));
    if (distance == 1) JAX_TCGEMM_RETURN_IF_ERROR(visit->meet());
    JAX_TCGEMM_RETURN_IF_ERROR(visit->send_to_buffer(distance, d, bytes, visit->own().part[to]));
  }
  visit->meeting().announce_copies(0);
  JAX_TCGEMM_RETURN_IF_ERROR(multiply(peers.rank, visit->own().buffer + peers.rank * bytes));
  JAX_TCGEMM_RETURN_IF_ERROR(visit->meeting().wait_for_copies(0));
  for (int from = 0; from < count; ++from) {
    if (from != peers.rank) JAX_TCGEMM_RETURN_IF_ERROR(visit->receive(0, from));
  }
  char* const own_sum =
      sums == nullptr ? static_cast<char*>(part.params.epilogue.d) : sums + peers.rank * bytes;
  JAX_TCGEMM_CUDA_CHECK(launch_sum_parts(visit->own().buffer, count, rows * part.params.n,
                                         part.params.epilogue.d_type, own_sum, stream),
                        "adding ", count, " parts of m=", rows, " n=", part.params.n);
  if (sums == nullptr) return visit->end(1);
  const cudaEvent_t summed = visit->own().part[peers.rank];
  JAX_TCGEMM_RETURN_IF_ERROR(record(summed, stream));
  JAX_TCGEMM_RETURN_IF_ERROR(visit->send_to_targets(1, own_sum, bytes, summed));
  JAX_TCGEMM_RETURN_IF_ERROR(visit->meeting().wait_for_copies(1));
  for (int from = 0; from < count; ++from) {
    if (from == peers.rank) continue;
    JAX_TCGEMM_RETURN_IF_ERROR(visit->receive_in_target(1, from, bytes));
  }
  return visit->end(2);
}

}  // namespace

int64_t part_bytes(const GemmProblem& part) {
  return int64_t{part.params.m} * part.params.n * element_bytes(part.params.epilogue.d_type);
}

GemmProblem part_of_rows(const GemmProblem& whole, int rank, int count, const void* a) {
  GemmProblem part = whole;
  part.params.m /= count;
  part = moved_down(part, int64_t{rank} * part.params.m);
  part.params.a.data = a;
  part.params.a.span /= count;
  return part;
}

Status run_gathered(const GatheredProduct& product, const GatheredRows& rows, const Peers& peers,
                    const DeviceProperties& device, cudaStream_t stream) {
  Gathers& gathers = Gathers::of_device(device.ordinal);
  const int64_t run = peers.key.run;
  if (!gathers.has_others(run, rows)) {
    Visit visit(peers, stream);
    JAX_TCGEMM_RETURN_IF_ERROR(
        visit.begin(device.ordinal, rows.shard_bytes, 0, rows.rows, rows.bytes));
    JAX_TCGEMM_RETURN_IF_ERROR(visit.checked(gather(product, rows, peers, &visit)));
    gathers.set_others(run, rows);
    if (product.multiply_part) return Status();
  }
  if (!gathers.has_own(run, rows)) {
    JAX_TCGEMM_RETURN_IF_ERROR(
        copy(rows.rows + peers.rank * rows.shard_bytes, rows.shard, rows.shard_bytes, stream));
    gathers.set_own(run, rows);
  }
  return product.multiply();
}

Status run_scattered(const GemmProblem& part, void* scratch, void* sums, const Peers& peers,
                     const DeviceProperties& device, cudaStream_t stream) {
  Visit visit(peers, stream);
  const int64_t sent_bytes = part_bytes(part), bytes = peers.count * sent_bytes;
  JAX_TCGEMM_RETURN_IF_ERROR(visit.begin(device.ordinal, sent_bytes, bytes, sums, bytes));
  return visit.checked(multiply_and_scatter(
      part, static_cast<char*>(scratch), static_cast<char*>(sums), peers, &visit, device, stream));
}

}  // namespace jax_tcgemm
