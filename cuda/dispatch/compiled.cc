#include "dispatch/compiled.h"

#include <algorithm>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "common/ceil_div.h"
#include "common/driver.h"
#include "dispatch/choice.h"
#include "dispatch/dispatch.h"
#include "dispatch/launch.h"
#include "dispatch/parts.h"
#include "dispatch/program_library.h"
#include "sm90/output/output_tile.h"
#include "sm90/tensor_maps.h"
#include "sm90/tma_descriptor.h"

namespace jax_tcgemm {
namespace {

// Returns the layouts of A and B; for a skinny row, of the operands that the kernel calls A and B.
std::string layout_name(const GemmProblem& problem, const KernelConfig& config) {
  const bool swaps = config.skinny && sm90::swaps_operands(config, problem.major_a, problem.major_b,
                                                           problem.params.m, problem.params.n);
  const bool k_major_a = (swaps ? problem.major_b : problem.major_a) == Major::kK;
  const bool k_major_b = (swaps ? problem.major_a : problem.major_b) == Major::kK;
  return std::string{k_major_a ? 'n' : 't', k_major_b ? 't' : 'n'};
}

ChoiceInput compiled_input(const GemmProblem& problem, const EpilogueProgram& program,
                           const DeviceProperties& device) {
  const GemmParams& p = problem.params;
  ChoiceInput input = choice_input(problem, device, 0);
  if (problem.grouped == Grouped::kM) input.batch = std::min(p.m, p.batch);  // with a row each
  input.epilogue = EpilogueWork::kAny;
  input.d_by_tma = true;        // threads write the results, in any layout
  input.run_time_rows = false;  // every kernel is compiled
  input.compiled = true;
  input.reduces = program.reduces;
  input.d_type = d_type_for_function(input, program.shows_sums);
  return input;
}

// Returns the rows to try, the expected fastest first.
std::vector<Choice> candidates(std::string_view config, const ChoiceInput& input,
                               const EpilogueProgram& program) {
  constexpr double kMostFactor = 1.3;  // a guess: nobody measured what spilling costs
  std::vector<Choice> rows;
  const auto ranked =
      compiled_choices(config, input, false, program.warp_bytes, program.result_bytes);
  for (const Estimate& estimate : ranked) {
    if (estimate.cycles > kMostFactor * ranked.front().cycles) break;
    rows.push_back(estimate.choice);
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
              const DeviceProperties& device, std::unique_lock<std::mutex>* lock,
              LoadedProgram* loaded, LoadedProgram::Chosen* chosen) {
  const auto rows = candidates(problem.config, input, program);
  JAX_TCGEMM_REQUIRE(!rows.empty(), "no kernel for m=", input.m, " n=", input.n, " k=", input.k,
                     " tma_addressable=", input.tma_addressable, " gated=", input.gated,
                     " with a compiled epilogue on compute capability ", input.compute_capability);
  constexpr size_t kMost = 3;
  std::vector<LoadedProgram::Chosen> spilling;
  for (const Choice& row : rows) {
    const KernelConfig& config = row.entry->config;
    const auto is_alike = [&](const LoadedProgram::Chosen& other) {
      const KernelKey& key = other.kernel->key;
      return key.adds_parts == row.has_fixup && has_same_registers(key.entry->config, config);
    };
    if (std::any_of(spilling.begin(), spilling.end(), is_alike)) continue;
    const KernelKey key = {row.entry, layout_name(problem, config), row.has_fixup,
                           device.compute_capability};
    LoadedKernel* kernel = nullptr;
    JAX_TCGEMM_RETURN_IF_ERROR(find_or_make_kernel(program, key, lock, loaded, &kernel));
    if (row.has_fixup) {
      GemmParams params = problem.params;
      JAX_TCGEMM_RETURN_IF_ERROR(set_tile_order(problem, config, &params));
      params.batch = parts_of_k(params.k, config, row.splits).count;
      if (!fits_at_once(config, &kernel->made.handle, params, device)) continue;
    }
    *chosen = {input, std::string(problem.config), kernel, row.splits};
    if (kernel->made.local_bytes == 0) return Status();
    spilling.push_back(*chosen);
    if (spilling.size() == kMost) break;
  }
  if (!spilling.empty()) {
    *chosen = spilling.front();
    return Status();
  }
  JAX_TCGEMM_REQUIRE(input.workspace_bytes > 0, "no kernel fits on ", device.name);
  ChoiceInput whole = input;
  whole.workspace_bytes = 0;  // another process holds some of the SMs: no k is split
  JAX_TCGEMM_RETURN_IF_ERROR(choose(program, problem, whole, device, lock, loaded, chosen));
  chosen->input = input;
  return Status();
}

// Finds any loaded kernel that can compute the problem, for when nothing can be compiled now.
LoadedProgram::Chosen any_loaded(LoadedProgram* loaded, const GemmProblem& problem,
                                 const ChoiceInput& input) {
  for (LoadedKernel& kernel : loaded->kernels) {
    const KernelConfig& config = kernel.key.entry->config;
    if (kernel.key.layout != layout_name(problem, config)) continue;
    if (kernel.key.compute_capability != input.compute_capability) continue;
    for (int splits = kernel.key.adds_parts ? config.warps_m : 1; splits > 0; --splits) {
      if (kernel.key.adds_parts && (splits == 1 || !supports_splits(config, input, splits))) break;
      if (supports(config, input, splits)) return {input, {}, &kernel, splits};
    }
  }
  return {input, {}, nullptr, 1};
}

// Finds or chooses the kernel for a problem. `lock` is the program's.
Status find_or_choose(const EpilogueProgram& program, const GemmProblem& problem,
                      const DeviceProperties& device, bool may_compile,
                      std::unique_lock<std::mutex>* lock, LoadedProgram* loaded,
                      LoadedProgram::Chosen* chosen) {
  const ChoiceInput input = compiled_input(problem, program, device);
  for (const LoadedProgram::Chosen& known : loaded->chosen) {
    if (known.input == input && known.config == problem.config) {
      *chosen = known;
      return Status();
    }
  }
  if (!may_compile) {
    *chosen = any_loaded(loaded, problem, input);
    JAX_TCGEMM_REQUIRE(chosen->kernel != nullptr,
                       "no kernel with this epilogue is loaded for m=", input.m, " n=", input.n,
                       " k=", input.k, " while a graph is captured");
    return Status();
  }
  JAX_TCGEMM_RETURN_IF_ERROR(choose(program, problem, input, device, lock, loaded, chosen));
  loaded->chosen.push_back(*chosen);
  return Status();
}

// Launches a kernel. `problem` describes the factors, `params` the whole product.
cudaError_t launch(const LoadedProgram::Chosen& chosen, const GemmProblem& problem,
                   const CompiledParams& params, const sm90::TensorMaps& maps,
                   const DeviceProperties& device, cudaStream_t stream) {
  const LaunchRequest request = {params, problem.major_a, problem.major_b, &maps, device, stream};
  return launch_compiled(chosen.kernel->key.entry->config, &chosen.kernel->made.handle, request);
}

}  // namespace

Status prepare_compiled(const GemmProblem& problem, const EpilogueProgram& program,
                        const DeviceProperties& device) {
  const auto loaded = loaded_program(program);
  std::unique_lock<std::mutex> lock(loaded->mutex);
  LoadedProgram::Chosen chosen = {};
  return find_or_choose(program, problem, device, true, &lock, loaded.get(), &chosen);
}

Status run_compiled(GemmProblem problem, const CompiledParams& params,
                    const EpilogueProgram& program, const DeviceProperties& device,
                    cudaStream_t stream) {
  bool capturing = false;
  JAX_TCGEMM_RETURN_IF_ERROR(is_captured(stream, &capturing));
  const auto loaded = loaded_program(program);
  for (;;) {
    LoadedProgram::Chosen chosen = {};
    {
      std::unique_lock<std::mutex> lock(loaded->mutex);
      JAX_TCGEMM_RETURN_IF_ERROR(
          find_or_choose(program, problem, device, !capturing, &lock, loaded.get(), &chosen));
    }
    const KernelEntry& entry = *chosen.kernel->key.entry;
    const KernelConfig& config = entry.config;
    CompiledParams complete = params;
    // Skinny rows with few sums then promote them, which costs no time.
    if (config.skinny) complete.epilogue.d_type = ElementType::kF32;
    JAX_TCGEMM_RETURN_IF_ERROR(set_tile_order(problem, config, &complete));
    if (chosen.kernel->key.adds_parts) {
      add_up_in_workspace(parts_of_k(params.k, config, chosen.splits), problem.workspace,
                          &complete);
    }
    sm90::TensorMaps maps = {};
    if (config.arch == Arch::kSm90) {
      JAX_TCGEMM_RETURN_IF_ERROR(sm90::encode_factors(problem, config, &maps));
    }
    const cudaError_t launched = launch(chosen, problem, complete, maps, device, stream);
    if (cluster_too_large(launched, config, device)) continue;
    if (launched == cudaErrorCooperativeLaunchTooLarge && chosen.kernel->key.adds_parts) {
      cudaGetLastError();           // clears the error, if CUDA found it
      problem.workspace_bytes = 0;  // another process holds some of the SMs: no k is split
      continue;
    }
    problem.params.split_stages = complete.split_stages;
    problem.params.fixup = complete.fixup;
    log_choice(problem, entry);
    JAX_TCGEMM_CUDA_CHECK(launched, "launching ", entry.name, " with a compiled epilogue",
                          " for m=", params.m, " n=", params.n, " k=", params.k, " on ",
                          device.name);
    return Status();
  }
}

}  // namespace jax_tcgemm
