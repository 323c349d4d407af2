// The meeting of the devices of one call, on the host: each device has a thread that runs the same
// program. The threads exchange pointers and wait for one another, for a limited time.
//
// A device that does not come (its program failed, or another program runs there) makes the call
// fail on all devices. Nothing on a device ever waits for a host.

#ifndef JAX_TCGEMM_OVERLAP_MEETING_H_
#define JAX_TCGEMM_OVERLAP_MEETING_H_

#include <array>
#include <atomic>
#include <compare>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "common/status.h"
#include "shared_limits.h"

namespace jax_tcgemm {

// The most rounds of copies in a call.
constexpr int kMostRounds = 2;

// The run of a program, a call in it, and a group of devices that exchange data in the call.
//
// XLA gives each run of a program its own number, the same on all devices. So two programs, or two
// runs of one program, never meet. The iterations of a loop come in the same order on all devices:
// a device's n-th call meets the n-th calls of the others.
struct MeetingKey {
  int64_t run;
  int64_t call;
  int64_t group;

  auto operator<=>(const MeetingKey&) const = default;
};

// Returns how long a device waits for the others: JAX_TCGEMM_OVERLAP_SECONDS, by default 600. The
// others may have to finish other work first.
double meeting_seconds();

class Meeting {
 public:
  explicit Meeting(int count) : count_(count) {}

  // Enters the meeting of `key` as device `rank`, and starts it if this device is the first.
  // `signature` has to be the same for all devices. `guest` is what the others get to see.
  static Status join(const MeetingKey& key, int count, int rank, int64_t signature, void* guest,
                     std::shared_ptr<Meeting>* meeting);

  // Makes a meeting fail that a device cannot join.
  static void refuse(const MeetingKey& key, int count, int64_t signature, const Status& reason);

  // Waits until all devices have joined.
  Status wait_for_guests() { return wait_for(&joined_, "had joined"); }

  // Enqueues a copy to another device, unless the meeting has failed. After `fail`, no device
  // enqueues copies.
  template <typename Enqueue>
  Status enqueue_copy(const Enqueue& enqueue) {
    const std::lock_guard<std::mutex> lock(copies_);
    const Status status = checked();
    return status.ok() ? enqueue() : status;
  }

  // Says that this device has enqueued its copies, and waits until all devices have. A call may
  // have two rounds of copies.
  void announce_copies(int round);
  Status wait_for_copies(int round) { return wait_for(&copied_[round], "had enqueued copies"); }

  // Makes the waiting devices fail, and those that come later.
  void fail(const Status& reason);

  // Returns an error if the meeting has failed.
  Status checked();

  // Leaves the meeting; returns true for the last device. No device will use a guest's events after
  // that.
  bool leave();

  // Returns the guest of a device; null if it has not joined.
  void* guest(int rank) const { return guests_[rank]; }

 private:
  static std::shared_ptr<Meeting>& find(const MeetingKey& key, int count, int64_t signature);
  Status wait_for(const std::atomic<int>* number, const char* what);
  void fail_locked(std::string reason);
  Status status() const;

  const int count_;
  int64_t signature_ = 0;
  std::atomic<int> joined_ = 0;
  std::array<std::atomic<int>, kMostRounds> copied_ = {};
  int left_ = 0;
  std::atomic<bool> failed_ = false;
  std::string reason_;
  std::array<void*, kMostPeers> guests_ = {};
  std::condition_variable changed_;
  std::mutex copies_;  // taken before the lock of all meetings
};

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_OVERLAP_MEETING_H_
