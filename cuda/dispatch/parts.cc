#include "dispatch/parts.h"

#include <stdint.h>

#include <atomic>
#include <chrono>

#include "common/ceil_div.h"
#include "shared_limits.h"

namespace jax_tcgemm {
namespace {

// Returns a launch's number, which a workspace is unlikely to hold by accident.
uint64_t next_launch() {
  static std::atomic<uint64_t> count{
      static_cast<uint64_t>(std::chrono::system_clock::now().time_since_epoch().count())};
  return ++count * 0x9e3779b97f4a7c15u | 1;
}

}  // namespace

Parts parts_of_k(int k, const KernelConfig& config, int splits) {
  const int64_t k_tiles = ceil_div(int64_t{k}, int64_t{config.tile_k});
  const int64_t stages = ceil_div(k_tiles, int64_t{splits});
  return {static_cast<int>(ceil_div(k_tiles, stages)), static_cast<int>(stages)};
}

void add_up_in_workspace(const Parts& parts, void* workspace, GemmParams* params) {
  params->split_stages = parts.stages;
  params->batch = parts.count;
  params->batch_rank = 0;
  char* const sums = static_cast<char*>(workspace) + kFixupFlagBytes;
  params->fixup = {parts.count, sums, static_cast<uint64_t*>(workspace), next_launch()};
}

}  // namespace jax_tcgemm
