#include "dispatch/compiled.h"

#include <algorithm>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "common/ceil_div.h"
#include "dispatch/choice.h"
#include "dispatch/dispatch.h"
#include "dispatch/launch.h"
#include "dispatch/program_library.h"
#include "dispatch/ragged.h"
#include "dispatch/time_correction.h"
#include "sm90/output/output_tile.h"
#include "sm90/tensor_maps.h"
#include "sm90/tma_descriptor.h"

namespace jax_tcgemm {
namespace {

// Checks if a row computes the problem as D^T.
bool swaps_operands(const GemmProblem& problem, const KernelConfig& config) {
  return sm90::swaps_operands(config, problem.major_a, problem.major_b, problem.params.m,
                              problem.params.n);
}

// Returns the layouts of A and B; for a skinny row, of the operands that the kernel calls A and B.
std::string layout_name(const GemmProblem& problem, const KernelConfig& config) {
  const bool swaps = config.skinny && swaps_operands(problem, config);
  const bool k_major_a = (swaps ? problem.major_b : problem.major_a) == Major::kK;
  const bool k_major_b = (swaps ? problem.major_a : problem.major_b) == Major::kK;
  return std::string{k_major_a ? 'n' : 't', k_major_b ? 't' : 'n'};
}

ChoiceInput compiled_input(const GemmProblem& problem, const EpilogueProgram& program,
                           const DeviceProperties& device) {
  const GemmParams& p = problem.params;
  ChoiceInput input = {};
  input.algorithm = problem.algorithm;
  input.grouped = problem.grouped;
  // The host does not know the groups' sizes, so all count as equal, with a row at least.
  const bool has_groups = input.grouped == Grouped::kM;
  input.m = has_groups ? ceil_div(p.m, p.batch) : p.m;
  input.n = p.n;
  input.k = p.k;
  input.batch = has_groups ? std::min(p.m, p.batch) : p.batch;
  input.aligned = problem.aligned();
  input.tma_addressable = problem.tma_addressable();
  input.major_a = problem.major_a;
  input.major_b = problem.major_b;
  input.epilogue = EpilogueWork::kAny;
  input.gated = p.epilogue.gated;
  input.d_type = p.epilogue.d_type;
  input.compute_capability = device.compute_capability;
  input.sm_count = device.sm_count;
  input.shared_memory_per_block = device.shared_memory_per_block;
  input.max_cluster_size = device.max_cluster_size.load(std::memory_order_relaxed);
  input.batch_rank = p.batch_rank;
  input.row_alignment_a = row_alignment(p.a, problem.algorithm);
  input.row_alignment_b = row_alignment(p.b, problem.algorithm);
  input.compiled = true;
  input.reduces = program.reduces;
  const bool is_dense = !input.gated && input.grouped == Grouped::kNone;
  if (program.widens && is_dense && element_bytes(problem.algorithm) == 2 && input.has_few_rows()) {
    input.d_type = ElementType::kF32;  // the sums are promoted
  }
  return input;
}

// Returns the rows to try: the one that is named, or those with room for the program, the expected
// fastest first.
std::vector<const KernelEntry*> candidates(std::string_view config, const ChoiceInput& input,
                                           const EpilogueProgram& program) {
  constexpr double kMostFactor = 1.3;  // a guess: nobody measured what spilling costs
  if (!config.empty()) {
    const KernelEntry* const named = named_or_chosen(config, input).entry;
    const bool is_named = named != nullptr && config == named->name;
    const bool has_room = is_named && (named->config.skinny ||
                                       named->config.staging_bytes() / 4 >= program.result_bytes);
    if (has_room) return {named};
  }
  std::vector<const KernelEntry*> rows;
  const auto ranked =
      with_room(ranked_choices(input, false), program.warp_bytes, program.result_bytes);
  for (const Estimate& estimate : ranked) {
    if (estimate.cycles > kMostFactor * ranked.front().cycles) break;
    rows.push_back(estimate.choice.entry);
  }
  return rows;
}

// Checks if two rows differ at most in clusters and stages, which take no registers.
bool has_same_registers(const KernelConfig& x, const KernelConfig& y) {
  const auto parts = [](const KernelConfig& config) {
    return std::tuple(config.arch, config.tile_m, config.tile_n, config.tile_k, config.warps_m,
                      config.warps_n, config.loader, config.promote, config.schedule,
                      config.split_k, config.gated, config.skinny, config.grouped, config.swap_ab);
  };
  return parts(x) == parts(y);
}

// Chooses the kernel for a problem: the fastest row whose registers suffice for the program. If all
// rows spill, it takes the fastest one.
Status choose(const EpilogueProgram& program, const GemmProblem& problem, const ChoiceInput& input,
              std::unique_lock<std::mutex>* lock, LoadedProgram* loaded, LoadedKernel** kernel) {
  const auto rows = candidates(problem.config, input, program);
  JAX_TCGEMM_REQUIRE(!rows.empty(), "no kernel for m=", input.m, " n=", input.n, " k=", input.k,
                     " tma_addressable=", input.tma_addressable, " gated=", input.gated,
                     " with a compiled epilogue on compute capability ", input.compute_capability);
  constexpr size_t kMost = 3;
  std::vector<LoadedKernel*> spilling;
  for (const KernelEntry* row : rows) {
    const auto is_alike = [&](const LoadedKernel* other) {
      return has_same_registers(other->entry->config, row->config);
    };
    if (std::any_of(spilling.begin(), spilling.end(), is_alike)) continue;
    JAX_TCGEMM_RETURN_IF_ERROR(
        find_or_make_kernel(program, row, layout_name(problem, row->config), lock, loaded, kernel));
    if ((*kernel)->made.local_bytes == 0) return Status();
    spilling.push_back(*kernel);
    if (spilling.size() == kMost) break;
  }
  *kernel = spilling.front();
  return Status();
}

// Returns any loaded kernel that can compute the problem, for when nothing can be compiled now.
LoadedKernel* any_loaded(LoadedProgram* loaded, const GemmProblem& problem,
                         const ChoiceInput& input) {
  for (LoadedKernel& kernel : loaded->kernels) {
    const KernelConfig& config = kernel.entry->config;
    if (kernel.layout == layout_name(problem, config) && supports(config, input)) return &kernel;
  }
  return nullptr;
}

// Finds or chooses the kernel for a problem. `lock` is the program's.
Status find_or_choose(const EpilogueProgram& program, const GemmProblem& problem,
                      const ChoiceInput& input, bool may_compile,
                      std::unique_lock<std::mutex>* lock, LoadedProgram* loaded,
                      LoadedKernel** kernel) {
  for (const LoadedProgram::Chosen& known : loaded->chosen) {
    if (known.input == input && known.config == problem.config) {
      *kernel = known.kernel;
      return Status();
    }
  }
  if (!may_compile) {
    *kernel = any_loaded(loaded, problem, input);
    JAX_TCGEMM_REQUIRE(*kernel != nullptr, "no kernel with this epilogue is loaded for m=", input.m,
                       " n=", input.n, " k=", input.k, " while a graph is captured");
    return Status();
  }
  JAX_TCGEMM_RETURN_IF_ERROR(choose(program, problem, input, lock, loaded, kernel));
  loaded->chosen.push_back({input, std::string(problem.config), *kernel});
  return Status();
}

}  // namespace

Status prepare_compiled(const GemmProblem& problem, const EpilogueProgram& program,
                        const DeviceProperties& device) {
  const auto loaded = loaded_program(program);
  std::unique_lock<std::mutex> lock(loaded->mutex);
  LoadedKernel* kernel = nullptr;
  return find_or_choose(program, problem, compiled_input(problem, program, device), true, &lock,
                        loaded.get(), &kernel);
}

Status run_compiled(const GemmProblem& problem, const CompiledParams& params,
                    const EpilogueProgram& program, const DeviceProperties& device,
                    cudaStream_t stream) {
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  JAX_TCGEMM_CUDA_CHECK(cudaStreamIsCapturing(stream, &capturing), "asking for a capture");
  const bool may_compile = capturing == cudaStreamCaptureStatusNone;
  const auto loaded = loaded_program(program);
  for (;;) {
    LoadedKernel* kernel = nullptr;
    {
      std::unique_lock<std::mutex> lock(loaded->mutex);
      JAX_TCGEMM_RETURN_IF_ERROR(find_or_choose(program, problem,
                                                compiled_input(problem, program, device),
                                                may_compile, &lock, loaded.get(), &kernel));
    }
    const KernelConfig& config = kernel->entry->config;
    CompiledParams complete = params;
    // Skinny rows with few sums then promote them, which costs no time.
    if (config.skinny) complete.epilogue.d_type = ElementType::kF32;
    if (config.grouped == Grouped::kM) {
      JAX_TCGEMM_RETURN_IF_ERROR(check_ragged_tiles(complete, config));
    } else {
      JAX_TCGEMM_RETURN_IF_ERROR(
          set_tile_order(config, swaps_operands(problem, config), &complete));
    }
    sm90::TensorMaps maps = {};
    JAX_TCGEMM_RETURN_IF_ERROR(sm90::encode_factors(problem, config, &maps));
    const LaunchRequest request = {complete, problem.major_a, problem.major_b,
                                   &maps,    device,          stream};
    const cudaError_t launched = launch_compiled(config, &kernel->made.handle, request);
    if (cluster_too_large(launched, config, device)) continue;
    log_choice(problem, *kernel->entry);
    JAX_TCGEMM_CUDA_CHECK(launched, "launching ", kernel->entry->name, " with a compiled epilogue",
                          " for m=", params.m, " n=", params.n, " k=", params.k, " on ",
                          device.name);
    return Status();
  }
}

}  // namespace jax_tcgemm
