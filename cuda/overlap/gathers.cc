#include "overlap/gathers.h"

#include <iterator>
#include <memory>

namespace jax_tcgemm {

Gathers& Gathers::of_device(int ordinal) {
  static std::mutex mutex;
  // Never freed: threads may outlive the interpreter.
  static auto* const devices = new std::map<int, std::unique_ptr<Gathers>>();
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Gathers>& found = (*devices)[ordinal];
  if (found == nullptr) found = std::make_unique<Gathers>();
  return *found;
}

void Gathers::begin(int64_t run, const GatheredRows& gathered) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto entry = entries_.lower_bound(gathered.rows);
  if (entry != entries_.begin()) {
    const auto before = std::prev(entry);
    if (before->first + before->second.bytes > gathered.rows) entry = before;
  }
  while (entry != entries_.end() && entry->first < gathered.rows + gathered.bytes) {
    entry = entries_.erase(entry);
  }
  std::erase_if(entries_, [&](const auto& each) { return each.second.shard == gathered.shard; });
  entries_[gathered.rows] = {run, gathered.shard, gathered.bytes, false, false};
}

Gathers::Entry* Gathers::find(int64_t run, const GatheredRows& gathered) {
  const auto found = entries_.find(gathered.rows);
  if (found == entries_.end()) return nullptr;
  Entry& entry = found->second;
  const bool is_same =
      entry.run == run && entry.shard == gathered.shard && entry.bytes == gathered.bytes;
  return is_same ? &entry : nullptr;
}

bool Gathers::has_others(int64_t run, const GatheredRows& gathered) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Entry* const entry = find(run, gathered);
  return entry != nullptr && entry->has_others;
}

bool Gathers::has_own(int64_t run, const GatheredRows& gathered) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Entry* const entry = find(run, gathered);
  return entry != nullptr && entry->has_own;
}

void Gathers::set_others(int64_t run, const GatheredRows& gathered) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (Entry* const entry = find(run, gathered)) entry->has_others = true;
}

void Gathers::set_own(int64_t run, const GatheredRows& gathered) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (Entry* const entry = find(run, gathered)) entry->has_own = true;
}

}  // namespace jax_tcgemm
