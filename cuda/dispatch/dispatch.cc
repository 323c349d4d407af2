#include "dispatch/dispatch.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <iterator>
#include <limits>

#include "common/ceil_div.h"
#include "common/saturating.h"
#include "dispatch/choice.h"
#include "dispatch/launch.h"
#include "dispatch/run_time_row.h"
#include "dispatch/sm90_time_model.h"
#include "epilogue/work.h"
#include "passes/pad_operand.h"
#include "passes/split_planes.h"
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
                     " aligned=", problem.aligned(), " gated=", p.epilogue.gated, " within ",
                     device.shared_memory_per_block, " bytes of shared memory and clusters of ",
                     input.max_cluster_size, " blocks on ", device.name);
  return Status();
}

// Replaces an unaligned operand by a padded copy in the workspace, of which `*used` bytes are
// taken. Returns false if there is no room. The caller makes the copy, by `pad`.
bool plan_padding(const GemmProblem& problem, Major major, int32_t extent_mn, Operand* operand,
                  PadProblem* pad, int64_t* used) {
  const GemmParams& params = problem.params;
  *pad = {};
  pad->in = *operand;
  pad->element_bytes = element_bytes(problem.algorithm);
  pad->rows = major == Major::kK ? extent_mn : params.k;
  pad->columns = major == Major::kK ? params.k : extent_mn;
  pad->batch_rank = params.batch_rank;
  std::copy(std::begin(params.batch_shape), std::end(params.batch_shape), pad->batch_shape);
  pad->out = static_cast<char*>(problem.workspace) + *used;
  const int64_t bytes = plan_pad(pad);
  // The lowering plans no copy for an operand whose base address alone is unaligned; kernels that
  // realign take it.
  if (add_sat(*used, bytes) > problem.padding_bytes) return false;
  *used += bytes;
  *operand = {pad->out, pad->out_ld, bytes / pad->element_bytes, pad->out_batch};
  return true;
}

Status pad_unaligned_operands(GemmProblem* problem, const DeviceProperties& device, int64_t* used,
                              cudaStream_t stream) {
  // A padded copy of one of two weights would have other strides than the second weight.
  if (problem->padding_bytes == 0 || problem->params.epilogue.gated) return Status();
  GemmParams& params = problem->params;
  // TMA takes rows that end between multiples of 16 bytes; cp.async does not.
  const bool by_tma = device.compute_capability == 90 && params.batch_rank <= kMaxTmaBatchRank &&
                      arithmetic_of(problem->algorithm).wgmma;
  PadProblem pads[2];
  int count = 0;
  if (!(by_tma ? problem->strides_aligned_a : problem->aligned_a) &&
      plan_padding(*problem, problem->major_a, params.m, &params.a, &pads[count], used)) {
    problem->strides_aligned_a = problem->aligned_a = true;
    ++count;
  }
  if (!(by_tma ? problem->strides_aligned_b : problem->aligned_b) &&
      plan_padding(*problem, problem->major_b, params.n, &params.b, &pads[count], used)) {
    problem->strides_aligned_b = problem->aligned_b = true;
    ++count;
  }
  if (count == 0) return Status();
  JAX_TCGEMM_CUDA_CHECK(launch_pads(pads, count, stream), "padding ", count,
                        " operands of m=", params.m, " n=", params.n, " k=", params.k);
  return Status();
}

SplitProblem split_of(const GemmProblem& problem, const Operand& operand, Major major,
                      int32_t extent_mn, bool is_pairs) {
  const GemmParams& params = problem.params;
  SplitProblem split = {};
  split.in = operand;
  split.major = major;
  split.count = problem.planes->count;
  split.rows = major == Major::kK ? extent_mn : params.k;
  split.columns = major == Major::kK ? params.k : extent_mn;
  split.pairs = is_pairs;
  if (is_pairs) split.rows /= 2;  // each row makes two, in either layout
  split.plane_k = static_cast<int32_t>(ceil_div(params.k, kPlaneTileK) * kPlaneTileK);
  split.batch_rank = params.batch_rank;
  std::copy(std::begin(params.batch_shape), std::end(params.batch_shape), split.batch_shape);
  return split;
}

// Replaces float32 operands by their planes in the workspace, of which `*used` bytes are taken.
Status split_into_planes(GemmProblem* problem, int64_t* used, cudaStream_t stream) {
  GemmParams& params = problem->params;
  const PlaneProduct& product = *problem->planes;
  SplitProblem splits[2] = {
      split_of(*problem, params.a, problem->major_a, params.m, false),
      split_of(*problem, params.b, problem->major_b, params.n, params.pairs_of_b)};
  Operand* const operands[2] = {&params.a, &params.b};
  for (int i = 0; i < 2; ++i) {
    SplitProblem& split = splits[i];
    split.out = static_cast<char*>(problem->workspace) + *used;
    const int64_t bytes = plan_split(&split);
    *used = add_sat(*used, bytes);
    if (*used > problem->padding_bytes) break;  // an error, see below
    *operands[i] = {split.out, split.out_ld, bytes / 2, split.out_batch};
  }
  const int64_t state_at = *used;
  *used = add_sat(*used, kSplitStateBytes);
  JAX_TCGEMM_REQUIRE(*used <= problem->padding_bytes, product.name, " of m=", params.m,
                     " n=", params.n, " k=", params.k, " takes ", *used, " bytes for planes, not ",
                     problem->padding_bytes);
  void* const state = static_cast<char*>(problem->workspace) + state_at;
  problem->major_a = problem->major_b = Major::kK;
  params.pairs_of_b = false;
  problem->aligned_a = problem->aligned_b = true;
  problem->strides_aligned_a = problem->strides_aligned_b = true;
  const int32_t k_tiles = splits[0].plane_k / kPlaneTileK;
  params.planes = {product.count, product.order, k_tiles, static_cast<const PlaneScale*>(state)};
  const int64_t k = int64_t{product.products} * splits[0].plane_k;
  JAX_TCGEMM_REQUIRE(k <= std::numeric_limits<int32_t>::max(), product.name, " of k=", params.k);
  params.k = product.count * splits[0].plane_k;
  JAX_TCGEMM_CUDA_CHECK(launch_splits(splits, state, stream), "splitting operands of m=", params.m,
                        " n=", params.n, " into planes");
  return Status();
}

bool takes_planes(const GemmProblem& problem, const DeviceProperties& device) {
  if (device.compute_capability != 90 || problem.params.batch_rank > kMaxTmaBatchRank ||
      problem.params.k <= 0) {
    return false;
  }
  const ChoiceInput input = choice_input(problem, device, 0);
  const auto rows = kernel_registry();
  return std::any_of(rows.begin(), rows.end(), [&](const KernelEntry& row) {
    return row.config.planes && (input.run_time_rows || has_epilogue(row.built_config(), input));
  });
}

// Selects a slow row that takes float32 operands as they are, if no kernel takes planes. This
// happens if a program was made for another GPU, or if the epilogue's kernel cannot be compiled.
Status take_operands_as_they_are(GemmProblem* problem) {
  for (const KernelEntry& entry : kernel_registry()) {
    const KernelConfig& config = entry.config;
    if (config.arch != Arch::kSimt || config.pairs != problem->params.pairs_of_b ||
        arithmetic_of(config.algorithm).a != ElementType::kF32) {
      continue;
    }
    problem->algorithm = config.algorithm;
    problem->config = entry.name;
    problem->planes = nullptr;
    problem->padding_bytes = 0;
    return Status();
  }
  JAX_TCGEMM_REQUIRE(false, "no kernel for ", problem->planes->name);
}

// Returns the products over parts of k, as a batch of float32 matrices in the workspace.
GemmProblem split_problem(const GemmProblem& whole, int stages, int splits, void* partial) {
  GemmProblem problem = whole;
  problem.params.split_stages = stages;
  problem.params.batch = splits;
  problem.params.batch_rank = 0;
  problem.params.epilogue = {};
  problem.params.epilogue.alpha.value = 1.f;
  problem.params.epilogue.d = partial;
  problem.params.epilogue.d_type = ElementType::kF32;
  problem.params.epilogue.d_vectorizable = true;
  return problem;
}

// Returns a launch's number, which a workspace is unlikely to hold by accident.
uint64_t next_launch() {
  static std::atomic<uint64_t> count{
      static_cast<uint64_t>(std::chrono::system_clock::now().time_since_epoch().count())};
  return ++count * 0x9e3779b97f4a7c15u | 1;
}

// Returns the whole problem for a kernel whose blocks add up parts of k.
GemmProblem fixup_problem(const GemmProblem& whole, int stages, int parts, char* workspace) {
  GemmProblem problem = whole;
  problem.params.split_stages = stages;
  problem.params.batch = parts;
  problem.params.batch_rank = 0;
  problem.params.fixup = {parts, workspace + kFixupFlagBytes,
                          reinterpret_cast<uint64_t*>(workspace), next_launch()};
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
  const bool swap_ab =
      sm90::swaps_operands(config, problem->major_a, problem->major_b, params.m, params.n);
  JAX_TCGEMM_RETURN_IF_ERROR(set_tile_order(config, swap_ab, &params));
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
  // The parts are equal except for the last one, and none is empty.
  const int64_t k_tiles = ceil_div(problem.params.k, choice.entry->config.tile_k);
  const int stages = static_cast<int>(ceil_div(k_tiles, choice.splits));
  const int splits = static_cast<int>(ceil_div(k_tiles, stages));
  if (choice.has_fixup) {
    GemmProblem whole = fixup_problem(problem, stages, splits, workspace);
    return launch(&whole, choice, device, stream, fit);
  }
  GemmProblem parts = split_problem(problem, stages, splits, workspace);
  JAX_TCGEMM_RETURN_IF_ERROR(launch(&parts, choice, device, stream, fit));
  if (*fit != Fit::kFits) return Status();
  const float* const partial = reinterpret_cast<const float*>(workspace);
  JAX_TCGEMM_CUDA_CHECK(launch_sum_splits(problem.params, arithmetic_of(problem.algorithm).output,
                                          partial, splits, stream),
                        "adding ", splits, " products of m=", problem.params.m,
                        " n=", problem.params.n);
  return Status();
}

}  // namespace

ChoiceInput choice_input(const GemmProblem& problem, const DeviceProperties& device, int64_t used) {
  const GemmParams& p = problem.params;
  const bool of_planes = p.planes.count > 0;
  return {
      .algorithm = problem.algorithm,
      .m = p.m,
      .n = p.n,
      .k = of_planes ? p.k / p.planes.count * problem.planes->products : p.k,
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
      .grouped = Grouped::kNone,
      .row_alignment_a = row_alignment(p.a, problem.algorithm),
      .row_alignment_b = row_alignment(p.b, problem.algorithm),
      .d_by_tma = sm90::d_by_tma(problem),
      .has_c = p.epilogue.c.data != nullptr,
      .c_by_tma = sm90::c_by_tma(problem),
      .of_planes = of_planes,
      .pairs = p.pairs_of_b,
      .run_time_rows = may_compile_rows(device),
  };
}

Status set_tile_order(const KernelConfig& config, bool swap_ab, GemmParams* params) {
  const int64_t group_rows = config.arch == Arch::kSm90 ? 2048 : 1024;
  const int64_t rows = config.tile_m * config.cluster_m;
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
  if (choice.splits > 1 && !choice.has_fixup) problem = split_problem(problem, 1, 1, nullptr);
  sm90::TensorMaps maps = {};
  if (config.arch == Arch::kSm90) sm90::describe(problem, config, &maps);
  begin_row_kernel(*choice.entry,
                   {problem.params, problem.major_a, problem.major_b, &maps, device, nullptr});
}

}  // namespace jax_tcgemm
