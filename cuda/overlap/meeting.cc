#include "overlap/meeting.h"

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>

namespace jax_tcgemm {
namespace {

// One lock for all meetings: a device takes it a few times in a call.
std::mutex mutex;

// The meetings that some devices have not joined yet, and those that failed. A failed meeting
// stays, so that a device that comes too late fails at once. Runs have different numbers, so the
// memory that this takes is bounded by the number of failures.
std::map<MeetingKey, std::shared_ptr<Meeting>>& open_meetings() {
  static auto* const meetings = new std::map<MeetingKey, std::shared_ptr<Meeting>>();
  return *meetings;
}

}  // namespace

double meeting_seconds() {
  static const double seconds = [] {
    const char* const text = std::getenv("JAX_TCGEMM_OVERLAP_SECONDS");
    const double value = text == nullptr ? 0.0 : std::atof(text);
    return value > 0.0 ? value : 600.0;
  }();
  return seconds;
}

// Finds an open meeting or starts it. The caller holds the lock.
std::shared_ptr<Meeting>& Meeting::find(const MeetingKey& key, int count, int64_t signature) {
  std::shared_ptr<Meeting>& found = open_meetings()[key];
  if (found == nullptr) {
    found = std::make_shared<Meeting>(count);
    found->signature_ = signature;
  }
  return found;
}

void Meeting::refuse(const MeetingKey& key, int count, int64_t signature, const Status& reason) {
  const std::lock_guard<std::mutex> lock(mutex);
  find(key, count, signature)->fail_locked("on another device: " + reason.message());
}

Status Meeting::join(const MeetingKey& key, int count, int rank, int64_t signature, void* guest,
                     std::shared_ptr<Meeting>* meeting) {
  const std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<Meeting>& found = find(key, count, signature);
  Meeting& own = *found;
  if (own.signature_ != signature || own.count_ != count || own.guests_[rank] != nullptr) {
    own.fail_locked(own.guests_[rank] != nullptr ? "a device came twice"
                                                 : "the devices came with different calls");
  }
  if (own.failed_) return own.status();
  own.guests_[rank] = guest;
  *meeting = found;
  if (++own.joined_ == own.count_) {
    open_meetings().erase(key);  // the same devices may meet again in this run
    (*meeting)->changed_.notify_all();
  }
  return Status();
}

void Meeting::announce_copies(int round) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (++copied_[round] == count_) changed_.notify_all();
}

Status Meeting::checked() {
  const std::lock_guard<std::mutex> lock(mutex);
  return status();
}

Status Meeting::wait_for(const std::atomic<int>* number, const char* what) {
  const std::chrono::duration<double> limit(meeting_seconds());
  // The others usually come within microseconds. To wake up a thread takes tens of them.
  constexpr std::chrono::microseconds kSpin(50);
  const auto end = std::chrono::steady_clock::now() + kSpin;
  while (!failed_ && *number != count_ && std::chrono::steady_clock::now() < end) {
  }
  std::unique_lock<std::mutex> lock(mutex);
  const bool is_done = changed_.wait_for(lock, limit, [&] { return failed_ || *number == count_; });
  if (!is_done) {
    fail_locked("after " + std::to_string(std::lround(meeting_seconds())) + " s, only " +
                std::to_string(*number) + " of " + std::to_string(count_) + " devices " + what +
                "; JAX_TCGEMM_OVERLAP_SECONDS sets the limit, JAX_TCGEMM_OVERLAP=off avoids the "
                "meeting");
  }
  return status();
}

Status Meeting::status() const {
  if (!failed_) return Status();
  return Status(Status::Code::kInternal,
                "jax_tcgemm: the devices of an overlapped product did not meet: " + reason_);
}

void Meeting::fail(const Status& reason) {
  const std::lock_guard<std::mutex> copies(copies_);  // none is enqueued after this
  const std::lock_guard<std::mutex> lock(mutex);
  fail_locked("on another device: " + reason.message());
}

void Meeting::fail_locked(std::string reason) {
  if (failed_) return;
  failed_ = true;
  reason_ = std::move(reason);
  changed_.notify_all();
}

bool Meeting::leave() {
  const std::lock_guard<std::mutex> lock(mutex);
  return ++left_ == count_;
}

}  // namespace jax_tcgemm
