// Stores sums if TMA cannot address D because D's rows begin anywhere. A warp writes its 16 rows in
// as few parts as its buffers hold. In the buffer each row has the same offset from a multiple of
// 16 bytes as in D. One bulk copy a row therefore stores all whole 16 bytes, and threads write the
// ends.

#pragma once

#include <stdint.h>

#include "common/dtype.cuh"
#include "ptx/cluster.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/tma.cuh"
#include "sm90/output/output_tile.h"
#include "sm90/output/subtile.cuh"

namespace jax_tcgemm::sm90 {

// Value is as large as D's elements.
template <typename Element, typename Value, int kRowBytes>
struct RowOutput {
  static constexpr int kSize = sizeof(Value);
  static constexpr int kPitch = kRowBytes + kGranule;
  static constexpr int kBytes = kWarpRows * kPitch;

  char* matrix;  // of m rows and n columns
  int m;
  int n;
  int y;  // first row of the sub-tile in the matrix
  int x;
  uint32_t buffer;

  // The addresses where a thread writes its values of the first chunk in rows 0 and 8.
  struct Place {
    uint32_t row[2];
  };

  __device__ __forceinline__ Place place() const {
    const int lane = ptx::volatile_lane();
    Place place;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = lane / 4 + i * 8;
      place.row[i] = buffer + row * kPitch + offset(row) + lane % 4 * 2 * kSize;
    }
    return place;
  }

  static __device__ __forceinline__ void store(const Place& place, const Chunk& value, int chunk) {
#pragma unroll
    for (int i = 0; i < kChunkValues; i += 2) {
      const int column = chunk * kChunkColumns + i / 4 * 8;
      store_pair(place.row[i / 2 % 2] + column * kSize, value[i], value[i + 1]);
    }
  }

  // All lanes call this after all have stored.
  __device__ __forceinline__ void send() const {
    const int bytes = min(n - x, kRowBytes / kSize) * kSize;
    if (bytes <= 0) return;
    const int row = ptx::volatile_lane();
    if (row < kWarpRows && y + row < m) {
      const int begin = offset(row);
      const int first = begin > 0 ? kGranule : 0;
      const int last = (begin + bytes) / kGranule * kGranule;
      if (last > first) {
        ptx::bulk_store(of_d(row) + (first - begin), buffer + row * kPitch + first, last - first);
      }
    }
    write_ends(bytes);
  }

 private:
  // Returns by how many bytes a row begins after a multiple of 16.
  __device__ __forceinline__ int offset(int row) const {
    const uint32_t elements = static_cast<uint32_t>(y + row) * n + x;
    return (static_cast<uint32_t>(reinterpret_cast<uint64_t>(matrix)) + elements * kSize) %
           kGranule;
  }
  __device__ __forceinline__ char* of_d(int row) const {
    return matrix + (int64_t{y + row} * n + x) * kSize;
  }

  static __device__ __forceinline__ void store_pair(uint32_t to, float first, float second) {
    if constexpr (sizeof(Value) == 4) {
      ptx::store_shared_4(to, first);
      ptx::store_shared_4(to + 4, second);
    } else {
      const uint32_t pair = pack<Element>(first, second);
      ptx::store_shared_2(to, static_cast<uint16_t>(pair));
      ptx::store_shared_2(to + 2, static_cast<uint16_t>(pair >> 16));
    }
  }

  // Writes the bytes of each row before the first and after the last whole 16 bytes. In a whole row
  // these are as many elements as 16 bytes hold, so that each lane writes one.
  __device__ __forceinline__ void write_ends(int bytes) const {
    constexpr int kLanes = kGranule / kSize;
    const int lane = ptx::volatile_lane();
    const int at = lane % kLanes * kSize;
#pragma unroll 1
    for (int row = lane / kLanes; row < min(kWarpRows, m - y); row += 32 / kLanes) {
      const int begin = offset(row);
      const int end = begin + bytes;
      const int last = end / kGranule * kGranule;
      const bool is_head = begin > 0 && at >= begin;
      const int from = is_head ? at : last + at;
      const uint32_t source = buffer + row * kPitch;
      char* const to = of_d(row) - begin;
      if (from >= begin && from < end) write(to + from, source + from);
      // D ends within this part, so there may be more elements after the last whole 16 bytes.
      if (bytes < kRowBytes && is_head && last > 0 && last + at < end) {
        write(to + last + at, source + last + at);
      }
    }
  }

  static __device__ __forceinline__ void write(char* to, uint32_t source) {
    if constexpr (sizeof(Value) == 4) {
      *reinterpret_cast<uint32_t*>(to) = ptx::load_shared_4(source);
    } else {
      *reinterpret_cast<uint16_t*>(to) = ptx::load_shared_2(source);
    }
  }
};

}  // namespace jax_tcgemm::sm90
