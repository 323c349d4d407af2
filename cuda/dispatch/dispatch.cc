#include "dispatch/dispatch.h"

#include <algorithm>
#include <limits>

#include "common/ceil_div.h"
#include "dispatch/choice.h"
#include "dispatch/launch.h"
#include "dispatch/operand_copies.h"
#include "dispatch/parts.h"
#include "dispatch/ragged.h"
#include "dispatch/run_time_row.h"
#include "epilogue/work.h"
#include "passes/sum_splits.h"
#include "shared_limits.h"
#include "sm90/output/output_tile.h"
#include "sm90/tma_descriptor.h"

namespace jax_tcgemm {
namespace {

// Chooses the row for a problem; `used` bytes of the workspace are taken.
Status find_kernel(const GemmProblem& problem, const DeviceProperties& device, int64_t used,
                   Choice* choice) {
  const GemmParams& p = problem.params;
  const ChoiceInput input = choice_input(problem, device, used);
  *choice = named_or_chosen(problem.config, input);
  JAX_TCGEMM_REQUIRE(choice->entry != nullptr, "no kernel for m=", p.m, " n=", p.n, " k=", p.k,
                     " batch=", p.batch, " aligned=", problem.aligned(),
                     " tma_addressable=", input.tma_addressable, " d_by_tma=", input.d_by_tma,
                     " gated=", p.epilogue.gated, " within ", device.shared_memory_per_block,
                     " bytes of shared memory and clusters of ", input.max_cluster_size,
                     " blocks on ", device.name);
  return Status();
}

// Returns the products over parts of k, as a batch of float32 matrices in the workspace.
GemmProblem split_problem(const GemmProblem& whole, const Parts& parts, void* partial) {
  GemmProblem problem = whole;
  problem.params.split_stages = parts.stages;
  problem.params.batch = parts.count;
  problem.params.batch_rank = 0;
  problem.params.epilogue = {};
  problem.params.epilogue.alpha.value = 1.f;
  problem.params.epilogue.d = partial;
  problem.params.epilogue.d_type = ElementType::kF32;
  problem.params.epilogue.d_vectorizable = true;
  return problem;
}

// Says if the device can run a kernel.
enum class Fit {
  kFits,
  kTooManyBlocks,    // blocks wait for one another, and there is no room for all at once
  kClusterTooLarge,  // there is no room for a cluster
  kNoKernel          // the kernel could not be compiled
};

// Launches the kernel of a choice. If it does not fit, nothing is launched and the status is OK.
Status launch(GemmProblem* problem, const Choice& choice, const DeviceProperties& device,
              cudaStream_t stream, Fit* fit) {
  GemmParams& params = problem->params;
  const KernelEntry& entry = *choice.entry;
  const KernelConfig config = choice.config();
  JAX_TCGEMM_RETURN_IF_ERROR(set_tile_order(*problem, config, &params));
  sm90::TensorMaps maps;
  if (config.arch == Arch::kSm90) {
    JAX_TCGEMM_RETURN_IF_ERROR(sm90::encode_tensor_maps(*problem, config, &maps));
  }
  const LaunchRequest request = {params, problem->major_a, problem->major_b,           &maps,
                                 device, stream,           problem->beside_collectives};
  KernelHandle* const kernel =
      choice.is_built ? built_kernel(config, *entry.kernels, request) : row_kernel(entry, request);
  if (kernel == nullptr && !choice.is_built) {
    *fit = Fit::kNoKernel;
    return Status();
  }
  const cudaError_t launched = launch_kernel(config, kernel, request);
  *fit = Fit::kFits;
  if (launched == cudaErrorCooperativeLaunchTooLarge && params.fixup.parts > 0) {
    *fit = Fit::kTooManyBlocks;  // launch_sm90 counted the blocks: CUDA was not asked
  } else if (cluster_too_large(launched, config, device)) {
    *fit = Fit::kClusterTooLarge;
  }
  if (*fit != Fit::kFits) return Status();
  log_choice(*problem, entry);
  JAX_TCGEMM_CUDA_CHECK(launched, "launching ", entry.name, " for m=", params.m, " n=", params.n,
                        " k=", params.k, " batch=", params.batch, " on ", device.name);
  return Status();
}

// Runs the problem by this choice. `workspace` holds the products over parts of k.
Status run_choice(GemmProblem problem, const Choice& choice, char* workspace,
                  const DeviceProperties& device, cudaStream_t stream, Fit* fit) {
  if (choice.splits == 1) return launch(&problem, choice, device, stream, fit);
  const Parts parts = parts_of_k(problem.params.k, choice.entry->config, choice.splits);
  if (choice.has_fixup) {
    add_up_in_workspace(parts, workspace, &problem.params);
    return launch(&problem, choice, device, stream, fit);
  }
  GemmProblem products = split_problem(problem, parts, workspace);
  JAX_TCGEMM_RETURN_IF_ERROR(launch(&products, choice, device, stream, fit));
  if (*fit != Fit::kFits) return Status();
  const float* const partial = reinterpret_cast<const float*>(workspace);
  JAX_TCGEMM_CUDA_CHECK(launch_sum_splits(problem.params, arithmetic_of(problem.algorithm).output,
                                          partial, parts.count, stream),
                        "adding ", parts.count, " products of m=", problem.params.m,
                        " n=", problem.params.n);
  return Status();
}

}  // namespace

ChoiceInput choice_input(const GemmProblem& problem, const DeviceProperties& device, int64_t used) {
  const GemmParams& p = problem.params;
  const bool of_planes = p.planes.count > 0;
  int64_t m = p.m, k = p.k;
  // The host does not know the groups' sizes, so all count as equal.
  if (problem.grouped == Grouped::kM) m = ceil_div(m, p.batch);
  if (problem.grouped == Grouped::kK) k = ceil_div(k, p.batch);
  if (of_planes) k = k / p.planes.count * problem.planes->products;
  return {
      .algorithm = problem.algorithm,
      .m = m,
      .n = p.n,
      .k = k,
      .batch = p.batch,
      .aligned = problem.aligned(),
      .tma_addressable = problem.tma_addressable() && p.batch_rank <= kMaxTmaBatchRank,
      .major_a = problem.major_a,
      .major_b = problem.major_b,
      .epilogue = work_of(p.epilogue),
      .gated = p.epilogue.gated,
      .d_type = p.epilogue.d_type,
      .workspace_bytes = problem.workspace_bytes - used,
      .compute_capability = device.compute_capability,
      .sm_count = device.sm_count,
      .shared_memory_per_block = device.shared_memory_per_block,
      .max_cluster_size = device.max_cluster_size.load(std::memory_order_relaxed),
      .batch_rank = p.batch_rank,
      .grouped = problem.grouped,
      .row_alignment_a = row_alignment(p.a, problem.algorithm),
      .row_alignment_b = row_alignment(p.b, problem.algorithm),
      .d_by_tma = sm90::d_by_tma(problem),
      .has_c = p.epilogue.c.data != nullptr,
      .c_by_tma = sm90::c_by_tma(problem),
      .of_planes = of_planes,
      .loaded_share = of_planes ? 1.0 * p.planes.count / problem.planes->products : 1.0,
      .pairs = p.pairs_of_b,
      .run_time_rows = may_compile_rows(device),
  };
}

Status set_tile_order(const GemmProblem& problem, const KernelConfig& config, GemmParams* params) {
  if (problem.grouped != Grouped::kNone) {
    return config.arch == Arch::kSm90 ? check_ragged_tiles(*params, config) : Status();
  }
  const bool swap_ab =
      sm90::swaps_operands(config, problem.major_a, problem.major_b, params->m, params->n);
  const int64_t group_rows = config.arch == Arch::kSm90 ? 2048 : 1024;
  const int64_t rows = config.output_m() * config.cluster_m;
  const int64_t tiles_m = ceil_div(swap_ab ? params->n : params->m, rows);
  const int64_t tiles_n =
      ceil_div(swap_ab ? params->m : params->n, config.output_n() * config.cluster_n);
  const int64_t width =
      config.skinny ? tiles_m : std::min(tiles_m, std::max(int64_t{1}, group_rows / rows));
  // A block counts tiles in 32 bits, up to one step of the grid beyond the last tile.
  constexpr int64_t kMaxTiles = std::numeric_limits<int32_t>::max() / 2;
  JAX_TCGEMM_REQUIRE(tiles_m * tiles_n <= kMaxTiles, "m=", params->m, " n=", params->n, " make ",
                     tiles_m * tiles_n, " tiles");
  const int64_t groups = ceil_div(tiles_m, width);
  const auto divisor = [](int64_t value) { return make_fast_divisor(static_cast<int32_t>(value)); };
  Raster& raster = params->raster;
  raster.order = RasterOrder::kAlongM;
  raster.tiles = divisor(tiles_m * tiles_n);
  raster.tiles_per_group = divisor(width * tiles_n);
  raster.width = divisor(width);
  raster.last_width = divisor(tiles_m - (groups - 1) * width);
  raster.last_group = static_cast<int32_t>(groups - 1);
  return Status();
}

bool cluster_too_large(cudaError_t launched, const KernelConfig& config,
                       const DeviceProperties& device) {
  const int size = config.arch == Arch::kSm90 ? config.cluster_size() : 1;
  if (launched != cudaErrorLaunchOutOfResources || size == 1) return false;
  cudaGetLastError();  // clears the error, or another library's check would report it
  log_line("a cluster of " + std::to_string(size) + " blocks does not fit on " + device.name +
           " now; smaller ones take its place until the process ends");
  int known = device.max_cluster_size.load(std::memory_order_relaxed);
  while (known >= size && !device.max_cluster_size.compare_exchange_weak(known, size - 1)) {
  }
  return true;
}

Status run_gemm(GemmProblem problem, const DeviceProperties& device, cudaStream_t stream) {
  JAX_TCGEMM_RETURN_IF_ERROR(check_device(device));
  const GemmProblem asked = problem;
  int64_t used = 0;
  if (problem.planes != nullptr && takes_planes(problem, device)) {
    JAX_TCGEMM_RETURN_IF_ERROR(split_into_planes(&problem, &used, stream));
  } else {
    if (problem.planes != nullptr) {
      JAX_TCGEMM_RETURN_IF_ERROR(take_operands_as_they_are(&problem));
    }
    JAX_TCGEMM_RETURN_IF_ERROR(pad_unaligned_operands(&problem, device, &used, stream));
  }
  char* const workspace = static_cast<char*>(problem.workspace) + used;
  // Another process may hold some of the SMs. A choice that does not fit is not made again: each
  // turn except the last one rules out splitting, the larger clusters, or kernels that are not in
  // the build.
  for (;;) {
    Choice choice;
    Fit fit = Fit::kFits;
    JAX_TCGEMM_RETURN_IF_ERROR(find_kernel(problem, device, used, &choice));
    JAX_TCGEMM_RETURN_IF_ERROR(run_choice(problem, choice, workspace, device, stream, &fit));
    if (fit == Fit::kFits) return Status();
    if (fit == Fit::kNoKernel && asked.planes != nullptr) return run_gemm(asked, device, stream);
    if (fit == Fit::kTooManyBlocks) used = problem.workspace_bytes;  // no k is split without it
  }
}

void begin_gemm(GemmProblem problem, const DeviceProperties& device) {
  // The layouts of planes and of copies are not known yet.
  if (problem.planes != nullptr || problem.padding_bytes > 0) return;
  const Choice choice = named_or_chosen(problem.config, choice_input(problem, device, 0));
  if (choice.entry == nullptr || choice.is_built) return;
  const KernelConfig& config = choice.entry->config;
  if (choice.splits > 1 && !choice.has_fixup) problem = split_problem(problem, {1, 1}, nullptr);
  sm90::TensorMaps maps = {};
  if (config.arch == Arch::kSm90) sm90::describe(problem, config, &maps);
  begin_row_kernel(*choice.entry,
                   {problem.params, problem.major_a, problem.major_b, &maps, device, nullptr});
}

}  // namespace jax_tcgemm
