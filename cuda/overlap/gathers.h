// The buffers of XLA's into which devices gather rows.
//
// In a program, a call makes such a buffer of a device's rows (ffi/gathers.cc), and each product
// that needs all rows takes it. The first of these products fills the buffer, beside its work; the
// others find it filled. So XLA decides how long the rows of all devices live, and its elimination
// of common subexpressions sees to it that products of the same rows share a buffer.
//
// If XLA should copy a buffer before it is filled, a product finds no entry, and fills the copy: a
// new buffer of the same rows makes earlier ones unknown, so no entry is left where the copy lies.

#ifndef JAX_TCGEMM_OVERLAP_GATHERS_H_
#define JAX_TCGEMM_OVERLAP_GATHERS_H_

#include <cstdint>
#include <map>
#include <mutex>

namespace jax_tcgemm {

// A buffer for the rows of all devices, and what it is filled from.
struct GatheredRows {
  const void* shard;  // (shard_bytes,): the rows of this device
  char* rows;         // (devices, shard_bytes), by rank
  int64_t shard_bytes;
  int64_t bytes;  // of all rows
};

// The buffers of a device.
class Gathers {
 public:
  // Returns the buffers of a device; they are known as long as the process lives.
  static Gathers& of_device(int ordinal);

  // Registers an empty buffer. Forgets buffers that overlapped it, and those of the same rows.
  void begin(int64_t run, const GatheredRows& gathered);

  // Checks if a run has filled a buffer with the rows of the other devices, or with its own.
  bool has_others(int64_t run, const GatheredRows& gathered);
  bool has_own(int64_t run, const GatheredRows& gathered);

  // Says so.
  void set_others(int64_t run, const GatheredRows& gathered);
  void set_own(int64_t run, const GatheredRows& gathered);

 private:
  struct Entry {
    int64_t run;
    const void* shard;
    int64_t bytes;
    bool has_others;
    bool has_own;
  };

  // Returns the entry of a buffer, or null. The caller holds the lock.
  Entry* find(int64_t run, const GatheredRows& gathered);

  std::mutex mutex_;
  std::map<const char*, Entry> entries_;  // by the beginning of the buffer
};

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_OVERLAP_GATHERS_H_
