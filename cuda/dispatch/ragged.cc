#include "dispatch/ragged.h"

#include <algorithm>
#include <limits>

#include "common/ceil_div.h"
#include "dispatch/choice.h"
#include "dispatch/dispatch.h"
#include "dispatch/launch.h"
#include "dispatch/run_time_row.h"
#include "epilogue/work.h"
#include "sm90/tensor_maps.h"
#include "sm90/tma_descriptor.h"

namespace jax_tcgemm {
namespace {

// Returns the facts for the choice of a row. The host does not know the groups' sizes, so all count
// as equal.
ChoiceInput even_groups(const GemmProblem& problem, Grouped grouped,
                        const DeviceProperties& device) {
  const GemmParams& p = problem.params;
  ChoiceInput input = {};
  input.algorithm = problem.algorithm;
  input.m = grouped == Grouped::kM ? ceil_div(p.m, p.batch) : p.m;
  input.n = p.n;
  input.k = grouped == Grouped::kK ? ceil_div(p.k, p.batch) : p.k;
  input.batch = p.batch;
  input.tma_addressable = problem.tma_addressable();
  input.major_a = problem.major_a;
  input.major_b = problem.major_b;
  input.epilogue = work_of(p.epilogue);
  input.d_type = p.epilogue.d_type;
  input.compute_capability = device.compute_capability;
  input.sm_count = device.sm_count;
  input.shared_memory_per_block = device.shared_memory_per_block;
  input.max_cluster_size = device.max_cluster_size.load(std::memory_order_relaxed);
  input.grouped = grouped;
  input.row_alignment_a = row_alignment(p.a, problem.algorithm);
  input.row_alignment_b = row_alignment(p.b, problem.algorithm);
  input.d_by_tma = sm90::d_by_tma(problem);
  input.run_time_rows = may_compile_rows(device);
  return input;
}

Status find_kernel(const GemmProblem& problem, const ChoiceInput& input, Choice* choice) {
  const GemmParams& p = problem.params;
  *choice = named_or_chosen(problem.config, input);
  JAX_TCGEMM_REQUIRE(choice->entry != nullptr, "no kernel for groups of m=", p.m, " n=", p.n,
                     " k=", p.k, " tma_addressable=", problem.tma_addressable(),
                     " d_by_tma=", input.d_by_tma, " and clusters of ", input.max_cluster_size,
                     " blocks on compute capability ", input.compute_capability);
  return Status();
}

// Launches the chosen row. `launched` is CUDA's answer. `kernel` is null if it could not be
// compiled. The function returns an error for a problem that no row could compute.
Status launch(const GemmProblem& problem, const Choice& choice, const DeviceProperties& device,
              cudaStream_t stream, KernelHandle** kernel, cudaError_t* launched) {
  const GemmParams& p = problem.params;
  const KernelEntry& entry = *choice.entry;
  sm90::TensorMaps maps;
  if (entry.config.arch == Arch::kSm90) {
    JAX_TCGEMM_RETURN_IF_ERROR(check_ragged_tiles(p, entry.config));
    JAX_TCGEMM_RETURN_IF_ERROR(sm90::encode_tensor_maps(problem, choice.config(), &maps));
  }
  const LaunchRequest request = {p, problem.major_a, problem.major_b, &maps, device, stream};
  *kernel = choice.is_built ? built_kernel(entry.config, *entry.kernels, request)
                            : row_kernel(entry, request);
  if (*kernel != nullptr || choice.is_built) {
    *launched = launch_kernel(entry.config, *kernel, request);
  }
  return Status();
}

}  // namespace

int64_t most_ragged_tiles(const GemmParams& p, const KernelConfig& config) {
  const int64_t rows = config.tile_m * config.cluster_m;
  // Groups of rows: each tile has a row at least, and a group's last tile may have no more.
  const int64_t m = p.m;
  const int64_t tiles_m = config.grouped == Grouped::kM
                              ? (m + (rows - 1) * std::min<int64_t>(m, p.batch + 1)) / rows
                              : ceil_div(m, rows) * p.batch;
  return tiles_m * ceil_div(p.n, config.output_n() * config.cluster_n);
}

Status check_ragged_tiles(const GemmParams& p, const KernelConfig& config) {
  const int64_t tiles = most_ragged_tiles(p, config);
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max() / 2;
  JAX_TCGEMM_REQUIRE(tiles <= kMax && p.m <= kMax && p.k <= kMax, "m=", p.m, " n=", p.n, " k=", p.k,
                     " groups=", p.batch, " make ", tiles, " tiles");
  return Status();
}

Status run_ragged(GemmProblem problem, Grouped grouped, const DeviceProperties& device,
                  cudaStream_t stream) {
  JAX_TCGEMM_RETURN_IF_ERROR(check_device(device));
  const GemmParams& p = problem.params;
  Choice choice;
  KernelHandle* kernel = nullptr;
  cudaError_t launched = cudaSuccess;
  do {
    const ChoiceInput input = even_groups(problem, grouped, device);
    JAX_TCGEMM_RETURN_IF_ERROR(find_kernel(problem, input, &choice));
    JAX_TCGEMM_RETURN_IF_ERROR(launch(problem, choice, device, stream, &kernel, &launched));
  } while ((kernel == nullptr && !choice.is_built) ||
           cluster_too_large(launched, choice.entry->config, device));
  log_choice(problem, *choice.entry);
  JAX_TCGEMM_CUDA_CHECK(launched, "launching ", choice.entry->name, " for m=", p.m, " n=", p.n,
                        " k=", p.k, " groups=", p.batch, " on ", device.name);
  return Status();
}

void begin_ragged(const GemmProblem& problem, Grouped grouped, const DeviceProperties& device) {
  const Choice choice = named_or_chosen(problem.config, even_groups(problem, grouped, device));
  if (choice.entry == nullptr || choice.is_built) return;
  sm90::TensorMaps maps = {};
  sm90::describe(problem, choice.entry->config, &maps);
  begin_row_kernel(*choice.entry,
                   {problem.params, problem.major_a, problem.major_b, &maps, device, nullptr});
}

}  // namespace jax_tcgemm
