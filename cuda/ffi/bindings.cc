// The Python module jax_tcgemm._core: FFI handlers, kernel names, build and device facts.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#if JAX_TCGEMM_HAS_CUDA
#include <cuda_runtime_api.h>

#include "dispatch/choice.h"
#include "dispatch/device.h"
#include "ffi/algorithm_names.h"
#include "ffi/handlers.h"
#endif

namespace nb = nanobind;

namespace jax_tcgemm {
namespace {

#if JAX_TCGEMM_HAS_CUDA

nb::dict registrations() {
  nb::dict result;
  result["jax_tcgemm_gemm_v1"] = nb::capsule(gemm_handler(), "xla._CUSTOM_CALL_TARGET");
  result["jax_tcgemm_ragged_dot_v1"] = nb::capsule(ragged_dot_handler(), "xla._CUSTOM_CALL_TARGET");
  result["jax_tcgemm_activation_gradient_v1"] =
      nb::capsule(activation_gradient_handler(), "xla._CUSTOM_CALL_TARGET");
  return result;
}

std::vector<std::string> kernel_names() {
  std::vector<std::string> names;
  for (const KernelEntry& entry : kernel_registry()) names.emplace_back(entry.name);
  return names;
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
  nb::dict result;
  result["name"] = properties->name;
  result["compute_capability"] = properties->compute_capability;
  result["sm_count"] = properties->sm_count;
  result["shared_memory_per_block"] = properties->shared_memory_per_block;
  result["shared_memory_per_sm"] = properties->shared_memory_per_sm;
  result["l2_bytes"] = properties->l2_bytes;
  result["driver_cuda"] = std::to_string(driver / 1000) + "." + std::to_string(driver % 1000 / 10);
  return result;
}

std::string choose_config(const std::string& algorithm, int64_t m, int64_t n, int64_t k,
                          int64_t batch, bool aligned, int sm_count, int shared_memory_per_block,
                          bool float32_result, int compute_capability, const std::string& layout,
                          int64_t workspace_bytes, const std::string& epilogue, bool gated,
                          const std::string& grouped, int max_cluster_size) {
  const auto decoded = algorithm_from_name(algorithm);
  if (!decoded) throw std::invalid_argument("unknown algorithm '" + algorithm + "'");
  if (layout.size() != 2) throw std::invalid_argument("layout '" + layout + "'");
  ChoiceInput input = {};
  input.algorithm = *decoded;
  input.m = m;
  input.n = n;
  input.k = k;
  input.batch = batch;
  input.aligned = input.tma_addressable = aligned;
  if (epilogue != "none" && epilogue != "sum" && epilogue != "any") {
    throw std::invalid_argument("epilogue '" + epilogue + "'");
  }
  input.epilogue = epilogue == "none" && !gated  ? EpilogueWork::kNone
                   : epilogue == "sum" && !gated ? EpilogueWork::kSum
                                                 : EpilogueWork::kAny;
  input.gated = gated;
  input.grouped = grouped == "m" ? Grouped::kM : grouped == "k" ? Grouped::kK : Grouped::kNone;
  input.major_a = layout[0] == 't' ? Major::kMn : Major::kK;
  input.major_b = layout[1] == 't' ? Major::kK : Major::kMn;
  input.d_type = float32_result ? ElementType::kF32 : arithmetic_of(*decoded).output;
  input.compute_capability = compute_capability;
  input.sm_count = sm_count;
  input.shared_memory_per_block = shared_memory_per_block;
  input.workspace_bytes = workspace_bytes;
  if (max_cluster_size > 0) input.max_cluster_size = max_cluster_size;
  const Choice choice = choose_kernel(input);
  if (choice.entry == nullptr) return "";
  const std::string name = choice.entry->name;
  if (choice.splits == 1) return name;
  return name + " splits=" + std::to_string(choice.splits) + (choice.has_fixup ? " fixup" : "");
}

#else

nb::dict registrations() { return nb::dict(); }
std::vector<std::string> kernel_names() { return {}; }
std::string cuda_version() { return ""; }
std::string ffi_version() { return ""; }

nb::dict device_properties(int) {
  throw std::runtime_error("jax_tcgemm was built without CUDA (JAX_TCGEMM_CUDA=OFF)");
}

std::string choose_config(const std::string&, int64_t, int64_t, int64_t, int64_t, bool, int, int,
                          bool, int, const std::string&, int64_t, const std::string&, bool,
                          const std::string&, int) {
  return "";
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
  module.def("build_info", &build_info);
  module.def("device_properties", &device_properties, nb::arg("ordinal"));
  module.def("choose_config", &choose_config, nb::arg("algorithm"), nb::arg("m"), nb::arg("n"),
             nb::arg("k"), nb::arg("batch"), nb::arg("aligned"), nb::arg("sm_count"),
             nb::arg("shared_memory_per_block"), nb::arg("float32_result") = false,
             nb::arg("compute_capability") = 80, nb::arg("layout") = "nn",
             nb::arg("workspace_bytes") = 0, nb::arg("epilogue") = "none", nb::arg("gated") = false,
             nb::arg("grouped") = "none", nb::arg("max_cluster_size") = 0);
}
