// Finds the rows of x that a block multiplies if consecutive groups of them have a weight each.
// Only the device knows the sizes of the groups. A negative size counts as 0, and no group extends
// beyond the existing rows.

#pragma once

#include <stdint.h>

#include "packed_config.h"

namespace jax_tcgemm::sm90 {

// Tiles of kTokens rows, group after group. Rows behind all groups are one more group. Whole warps
// search, and each lane looks at one group of 32.
template <int kTokens>
struct PackedGroups {
  const PackedParams& params;
  int group = 0;  // of the tile found
  int token = 0;  // its first row
  int end = 0;    // behind the last row of the group

  __device__ __forceinline__ explicit PackedGroups(const PackedParams& all) : params(all) {}

  // Finds tile `index` and returns false if there are fewer. The lanes of a warp find the same one.
  __device__ __forceinline__ bool find(int index) {
    uint32_t rows_before = 0;
    int tiles_before = 0;
    for (int first = 0; first <= params.experts; first += 32) {
      const uint32_t m = params.m;
      const int own = first + static_cast<int>(threadIdx.x % 32);
      uint32_t size = own == params.experts ? m : 0;
      if (own < params.experts)
        size = min(static_cast<uint32_t>(max(params.group_sizes[own], 0)), m);
      const uint32_t own_end = min(rows_before + scan(size, m), m);
      uint32_t own_begin = __shfl_up_sync(kAll, own_end, 1);
      if (threadIdx.x % 32 == 0) own_begin = rows_before;
      const int tiles = static_cast<int>((own_end - own_begin + kTokens - 1) / kTokens);
      const int tiles_end = tiles_before + static_cast<int>(scan(tiles, INT32_MAX));
      const uint32_t later = __ballot_sync(kAll, index < tiles_end);
      if (later != 0) {
        const int lane = __ffs(later) - 1;
        const int tile = index - __shfl_sync(kAll, tiles_end - tiles, lane);
        group = first + lane;
        token = static_cast<int>(__shfl_sync(kAll, own_begin, lane)) + tile * kTokens;
        end = static_cast<int>(__shfl_sync(kAll, own_end, lane));
        return true;
      }
      rows_before = __shfl_sync(kAll, own_end, 31);
      tiles_before = __shfl_sync(kAll, tiles_end, 31);
    }
    return false;
  }

 private:
  static constexpr uint32_t kAll = 0xffffffff;

  // Returns the sum over the lanes up to this one, at most `limit`, which is below 2^31.
  static __device__ __forceinline__ uint32_t scan(uint32_t value, uint32_t limit) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const uint32_t other = __shfl_up_sync(kAll, value, distance);
      if (threadIdx.x % 32 >= distance) value = min(value + other, limit);
    }
    return value;
  }
};

}  // namespace jax_tcgemm::sm90
