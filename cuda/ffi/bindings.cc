// The Python module jax_tcgemm._core: FFI handlers, kernel names, build and device facts.

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/set.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "dispatch/choice.h"
#include "dispatch/heuristic.h"
#include "dispatch/time_correction.h"
#include "ffi/algorithm_names.h"
#include "shared_limits.h"

#if JAX_TCGEMM_HAS_CUDA
#include <cuda_runtime_api.h>

#include "common/status.h"
#include "dispatch/device.h"
#include "dispatch/program_library.h"
#include "dispatch/run_time_kernel.h"
#include "dispatch/run_time_row.h"
#include "ffi/handlers.h"
#include "ffi/stopwatch.h"
#include "overlap/endpoint.h"
#endif

namespace nb = nanobind;

namespace jax_tcgemm {
namespace {

// A name for `config=`, the expected cycles, and true if the row's blocks add up parts of k.
using RankedConfig = std::tuple<std::string, double, bool>;

std::vector<std::string> kernel_names() {
  std::vector<std::string> names;
  for (const KernelEntry& entry : kernel_registry()) {
    const bool is_of_8_bits = arithmetic_of(entry.config.algorithm).at_run_time;
    if (JAX_TCGEMM_HAS_CUDA && !is_of_8_bits) names.emplace_back(entry.name);
  }
  return names;
}

// See _core.pyi.
RowFacts row_facts(std::string_view name) {
  for (const KernelEntry& entry : kernel_registry()) {
    if (name == entry.name) return facts_of(entry.config);
  }
  return {};
}

EpilogueWork work_called(const std::string& name) {
  if (name == "none") return EpilogueWork::kNone;
  if (name == "sum") return EpilogueWork::kSum;
  if (name == "any") return EpilogueWork::kAny;
  throw std::invalid_argument("epilogue '" + name + "'");
}

// Reads a ChoiceInput of jax_tcgemm/kernels/choice_input.py.
ChoiceInput choice_input(const nb::object& problem) {
  const auto read = [&]<class T>(const char* name, T* value) {
    *value = nb::cast<T>(problem.attr(name));
  };
  ChoiceInput input = {};
  std::string algorithm, layout, epilogue, grouped;
  bool float32_result = false, shows_sums = false;
  int max_cluster_size = 0;
  read("algorithm", &algorithm);
  read("m", &input.m);
  read("n", &input.n);
  read("k", &input.k);
  read("batch", &input.batch);
  read("aligned", &input.aligned);
  read("sm_count", &input.sm_count);
  read("shared_memory_per_block", &input.shared_memory_per_block);
  read("float32_result", &float32_result);
  read("shows_sums", &shows_sums);
  read("compute_capability", &input.compute_capability);
  read("layout", &layout);
  read("workspace_bytes", &input.workspace_bytes);
  read("epilogue", &epilogue);
  read("gated", &input.gated);
  read("grouped", &grouped);
  read("max_cluster_size", &max_cluster_size);
  read("batch_rank", &input.batch_rank);
  read("row_alignment_a", &input.row_alignment_a);
  read("row_alignment_b", &input.row_alignment_b);
  read("d_by_tma", &input.d_by_tma);
  read("has_c", &input.has_c);
  read("c_by_tma", &input.c_by_tma);
  read("compiled", &input.compiled);
  read("reduces", &input.reduces);
  read("run_time_rows", &input.run_time_rows);
  const auto decoded = algorithm_from_name(algorithm);
  if (!decoded) throw std::invalid_argument("unknown algorithm '" + algorithm + "'");
  if (layout.size() != 2) throw std::invalid_argument("layout '" + layout + "'");
  input.algorithm = *decoded;
  const nb::object by_tma = problem.attr("tma_addressable");
  input.tma_addressable = by_tma.is_none() ? input.aligned : nb::cast<bool>(by_tma);
  const EpilogueWork work = work_called(epilogue);
  input.epilogue = input.gated ? EpilogueWork::kAny : work;
  input.grouped = grouped == "m" ? Grouped::kM : grouped == "k" ? Grouped::kK : Grouped::kNone;
  input.major_a = layout[0] == 't' ? Major::kMn : Major::kK;
  input.major_b = layout[1] == 't' ? Major::kK : Major::kMn;
  input.d_type = float32_result ? ElementType::kF32 : arithmetic_of(*decoded).output;
  if (input.compiled) input.d_type = d_type_for_function(input, shows_sums);
  if (max_cluster_size > 0) input.max_cluster_size = max_cluster_size;
  return input;
}

// See _core.pyi.
std::vector<RankedConfig> rank_configs(const nb::object& problem, bool dense_splits,
                                       int64_t warp_bytes, int64_t result_bytes,
                                       std::string_view config) {
  const ChoiceInput input = choice_input(problem);
  std::vector<RankedConfig> ranked;
  const std::vector<Estimate> estimates =
      input.compiled ? compiled_choices(config, input, dense_splits, warp_bytes, result_bytes)
                     : ranked_choices(input, dense_splits);
  for (const Estimate& estimate : estimates) {
    ranked.emplace_back(config_of(estimate.choice), estimate.cycles, estimate.choice.has_fixup);
  }
  return ranked;
}

// See _core.pyi.
using TimedConfig = std::tuple<std::string, double, TimeTerms>;
std::vector<TimedConfig> time_terms_of(const nb::object& problem) {
  const ChoiceInput input = choice_input(problem);
  std::vector<TimedConfig> result;
  for (const auto& [choice, cycles] : modelled_choices(input, true)) {
    const KernelConfig& config = choice.entry->config;
    const TimeTerms terms = time_terms(config, as_modelled(input, config), choice.splits, cycles);
    result.emplace_back(config_of(choice), cycles, terms);
  }
  return result;
}

#if JAX_TCGEMM_HAS_CUDA

nb::dict registrations() {
  nb::dict result;
  const auto capsule = [](void* handler) {
    return nb::capsule(handler, "xla._CUSTOM_CALL_TARGET");
  };
  for (const Target& target :
       {gemm_target(), ragged_dot_target(), compiled_gemm_target(), compiled_pass_target(),
        packed_target(), packed_ragged_target(), packed_function_target(), overlapped_target(),
        overlapped_function_target(), gathers_target(), pack_target(), unpack_target(),
        transpose_target(), mark_target()}) {
    if (target.instantiate == nullptr) {
      result[target.name] = capsule(target.execute);
      continue;
    }
    nb::dict stages;
    stages["instantiate"] = capsule(target.instantiate);
    stages["execute"] = capsule(target.execute);
    result[target.name] = stages;
  }
  return result;
}

// Sets Python functions as the compiler. XLA's threads call them without Python's lock. An
// exception of `compile` becomes XLA's error, or rules out kernels that the build lacks.
void set_python_compiler(nb::object compile, nb::object begin) {
  const auto call = [](const nb::object& function, const KernelSource& source) -> nb::object {
    const auto text = [](std::string_view view) { return nb::str(view.data(), view.size()); };
    return function(text(source.program), text(source.row), text(source.layout), source.has_program,
                    source.compute_capability);
  };
  // Never freed: threads may outlive the interpreter.
  auto* const kept_compile = new nb::object(std::move(compile));
  auto* const kept_begin = new nb::object(std::move(begin));
  set_compiler({[=](const KernelSource& source, std::string* cubin) {
                  const nb::gil_scoped_acquire locked;
                  try {
                    const auto bytes = nb::cast<nb::bytes>(call(*kept_compile, source));
                    cubin->assign(bytes.c_str(), bytes.size());
                    return Status();
                  } catch (const std::exception& error) {
                    return Status(Status::Code::kInternal, "jax_tcgemm: compiling a kernel of " +
                                                               std::string(source.row) + ": " +
                                                               error.what());
                  }
                },
                [=](const KernelSource& source) {
                  const nb::gil_scoped_acquire locked;
                  try {
                    call(*kept_begin, source);
                  } catch (const std::exception&) {
                    // `compile` will report the error.
                  }
                }});
}

std::string cuda_version() {
  return std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
}

std::string ffi_version() { return xla_ffi_api_version(); }

nb::dict device_properties(int ordinal) {
  const DeviceProperties* properties = nullptr;
  const Status status = get_device_properties(ordinal, &properties);
  if (!status.ok()) throw std::runtime_error(status.message());
  int driver = 0;
  cudaDriverGetVersion(&driver);
  // A value is 0 if the driver does not say.
  int clock_khz = 0, memory_clock_khz = 0, memory_bus_bits = 0;
  cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, ordinal);
  cudaDeviceGetAttribute(&memory_clock_khz, cudaDevAttrMemoryClockRate, ordinal);
  cudaDeviceGetAttribute(&memory_bus_bits, cudaDevAttrGlobalMemoryBusWidth, ordinal);
  cudaGetLastError();
  nb::dict result;
  result["name"] = properties->name;
  result["compute_capability"] = properties->compute_capability;
  result["sm_count"] = properties->sm_count;
  result["shared_memory_per_block"] = properties->shared_memory_per_block;
  result["shared_memory_per_sm"] = properties->shared_memory_per_sm;
  result["l2_bytes"] = properties->l2_bytes;
  result["clock_rate"] = 1e3 * clock_khz;
  // The memory makes two transfers a clock.
  result["memory_bandwidth"] = 2e3 * memory_clock_khz * memory_bus_bits / 8;
  result["driver_cuda"] = std::to_string(driver / 1000) + "." + std::to_string(driver % 1000 / 10);
  return result;
}

void limit_overlap_buffers(int64_t bytes) { Endpoint::limit_buffers(bytes); }

// See _core.pyi.
int link_of(const std::vector<int>& ordinals) {
  int least = kNvlink;
  for (const int from : ordinals) {
    for (const int to : ordinals) {
      if (from == to) continue;
      int can = 0, has_atomics = 0;
      const bool is_known =
          cudaDeviceCanAccessPeer(&can, from, to) == cudaSuccess &&
          // NVLink has atomic operations, PCIe has not.
          cudaDeviceGetP2PAttribute(&has_atomics, cudaDevP2PAttrNativeAtomicSupported, from, to) ==
              cudaSuccess;
      if (!is_known) cudaGetLastError();
      if (!is_known || can == 0) return kNoLink;
      if (has_atomics == 0) least = kSlowLink;
    }
  }
  return least;
}

#else

nb::dict registrations() { return nb::dict(); }
int link_of(const std::vector<int>&) { return kNoLink; }
int64_t overlapped_number_reads() { return 0; }
void limit_overlap_buffers(int64_t) {}
void set_python_compiler(nb::object, nb::object) {}
bool may_compile_rows() { return false; }
void release_unused_programs(const std::set<std::string>&, double) {}
int loaded_program_count() { return 0; }
void configure_gate(int, uint32_t, const std::string&) {}
void open_gates(int, uint32_t) {}
std::vector<std::vector<double>> stopwatch_seconds(int) { return {}; }
std::string cuda_version() { return ""; }
std::string ffi_version() { return ""; }

nb::dict device_properties(int) {
  throw std::runtime_error("jax_tcgemm was built without CUDA (JAX_TCGEMM_CUDA=OFF)");
}

#endif

nb::dict build_info() {
  nb::dict result;
  result["cuda"] = cuda_version();
  result["architectures"] = JAX_TCGEMM_ARCHITECTURES;
  result["xla_ffi_api"] = ffi_version();
  result["kernels_glob"] = JAX_TCGEMM_KERNELS_GLOB;
  return result;
}

}  // namespace

}  // namespace jax_tcgemm

NB_MODULE(_core, module) {
  using namespace jax_tcgemm;
  module.def("registrations", &registrations);
  module.def("kernel_names", &kernel_names);
  nb::class_<RowFacts>(module, "RowFacts")
      .def_ro("splits_k", &RowFacts::splits_k)
      .def_ro("adds_parts", &RowFacts::adds_parts)
      .def_ro("takes_functions", &RowFacts::takes_functions)
      .def_ro("takes_reductions", &RowFacts::takes_reductions)
      .def_ro("warp_buffer_bytes", &RowFacts::warp_buffer_bytes)
      .def_ro("shared_memory_bytes", &RowFacts::shared_memory_bytes);
  module.def("row_facts", &row_facts, nb::arg("name"));
  module.def("build_info", &build_info);
  module.def("release_unused_programs", &release_unused_programs, nb::arg("used_digests"),
             nb::arg("grace_seconds"), nb::call_guard<nb::gil_scoped_release>());
  module.def("loaded_program_count", &loaded_program_count);
  module.def("set_compiler", &set_python_compiler, nb::arg("compile_kernel"), nb::arg("begin"));
  module.def("may_compile_rows", [] { return may_compile_rows(); });
  module.def("configure_gate", &configure_gate, nb::arg("ordinal"), nb::arg("gate"),
             nb::arg("config"));
  module.def("open_gates", &open_gates, nb::arg("ordinal"), nb::arg("count"),
             nb::call_guard<nb::gil_scoped_release>());
  module.def("stopwatch_seconds", &stopwatch_seconds, nb::arg("ordinal"),
             nb::call_guard<nb::gil_scoped_release>());
  module.def("overlapped_number_reads", &overlapped_number_reads);
  module.def("limit_overlap_buffers", &limit_overlap_buffers, nb::arg("most_bytes"));
  module.def("link_of", &link_of, nb::arg("ordinals"));
  module.def("device_properties", &device_properties, nb::arg("ordinal"));
  module.attr("NO_LINK") = kNoLink;
  module.attr("SLOW_LINK") = kSlowLink;
  module.attr("NVLINK") = kNvlink;
  module.attr("MOST_SPLITS") = kMostSplits;
  module.attr("VECTOR_COLUMNS") = kVectorColumns;
  module.attr("FIXUP_FLAG_BYTES") = kFixupFlagBytes;
  module.attr("FEW_ROWS") = kFewRows;
  module.attr("MAX_BATCH_RANK") = kMaxBatchRank;
  module.attr("MAX_TMA_BATCH_RANK") = kMaxTmaBatchRank;
  module.attr("MAX_GRID_ROWS") = kMaxGridRows;
  module.attr("PLANE_TILE_K") = kPlaneTileK;
  module.attr("SPLIT_STATE_BYTES") = kSplitStateBytes;
  module.attr("MAX_COMPILED_OPERANDS") = kMaxCompiledOperands;
  module.attr("MAX_COMPILED_RESULTS") = kMaxCompiledResults;
  module.attr("SCALE_BLOCK") = kScaleBlock;
  module.attr("MOST_PEERS") = kMostPeers;
  module.attr("PASS_BLOCK") = nb::make_tuple(kPassRows, kPassColumns);
  module.def("rank_configs", &rank_configs, nb::arg("problem"), nb::arg("dense_splits") = false,
             nb::arg("warp_bytes") = 0, nb::arg("result_bytes") = 0, nb::arg("config") = "");
  module.def("time_terms", &time_terms_of, nb::arg("problem"));
}
