#include "dispatch/packed.h"

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <memory>
#include <mutex>
#include <string>

#include "common/ceil_div.h"
#include "common/driver.h"
#include "common/saturating.h"
#include "dispatch/program_library.h"
#include "shared_limits.h"
#include "sm90/tma_descriptor.h"

namespace jax_tcgemm {
namespace {

const char* name_of(PackedFormat format) {
  switch (format) {
    case PackedFormat::kInt4:
      return "kInt4";
    case PackedFormat::kUint4:
      return "kUint4";
    case PackedFormat::kInt8:
      return "kInt8";
    case PackedFormat::kE4m3:
      return "kE4m3";
  }
  return "";
}

const char* name_of(ElementType type) {
  return type == ElementType::kBf16 ? "kBf16" : type == ElementType::kF16 ? "kF16" : "kF32";
}

// Returns the initialiser of a PackedConfig, which is the program of the kernel.
std::string source_of(const PackedConfig& c) {
  std::string text = std::string("{PackedFormat::") + name_of(c.format);
  for (const ElementType type : {c.activation, c.scale, c.output}) {
    text += std::string(", ElementType::") + name_of(type);
  }
  text += c.has_zeros ? ", true" : ", false";
  for (const int number :
       {c.group, c.tokens, c.row_blocks, c.k_blocks, c.stages, c.split_k, c.blocks_on_sm}) {
    text += ", " + std::to_string(number);
  }
  if (c.is_ragged || c.weights != 1) text += c.is_ragged ? ", true" : ", false";
  if (c.weights != 1) text += ", " + std::to_string(c.weights);
  return text + "}";
}

// Finds the kernel, whose program is that of the configuration if `program` is empty.
Status find(const PackedConfig& config, std::string_view digest, std::string_view program_text,
            const char* layout, bool capturing, std::shared_ptr<LoadedProgram>* loaded,
            LoadedKernel** kernel) {
  const std::string source = source_of(config);
  if (!program_text.empty()) {
    JAX_TCGEMM_REQUIRE(program_text.substr(0, source.size()) == source &&
                           program_text.substr(source.size(), 1) == "\n",
                       "a program that is not for ", source);
  }
  const EpilogueProgram program = {digest, program_text.empty() ? source : program_text};
  *loaded = loaded_program(program);
  std::unique_lock<std::mutex> lock((*loaded)->mutex);
  *kernel = find_kernel(loaded->get(), {nullptr, layout});
  if (*kernel != nullptr) return Status();
  JAX_TCGEMM_REQUIRE(!capturing,
                     "no kernel for packed weights is loaded while a graph is captured");
  return find_or_make_kernel(program, {nullptr, layout}, &lock, loaded->get(), kernel);
}

}  // namespace

Status check_packed(const PackedConfig& c) {
  const auto is_one_of = [](int value, std::initializer_list<int> accepted) {
    for (const int each : accepted) {
      if (value == each) return true;
    }
    return false;
  };
  JAX_TCGEMM_REQUIRE(is_one_of(c.tokens, {8, 16, 32, 64, 128}), "tokens=", c.tokens);
  JAX_TCGEMM_REQUIRE(is_one_of(c.row_blocks, {1, 2, 4}), "row_blocks=", c.row_blocks);
  JAX_TCGEMM_REQUIRE(is_one_of(c.weights, {1, 2}) && c.row_blocks % c.weights == 0,
                     "weights=", c.weights, " in ", c.row_blocks, " blocks");
  JAX_TCGEMM_REQUIRE(is_one_of(c.k_blocks, {2, 4}), "k_blocks=", c.k_blocks);
  JAX_TCGEMM_REQUIRE(is_one_of(c.split_k, {1, 2, 4, 8}), "split_k=", c.split_k);
  JAX_TCGEMM_REQUIRE(is_one_of(c.group, {32, 64, 128, c.stage_k()}), "group=", c.group);
  JAX_TCGEMM_REQUIRE(1 < c.stages && c.stages <= 32, "stages=", c.stages);
  JAX_TCGEMM_REQUIRE(1 <= c.blocks_on_sm && c.blocks_on_sm <= 16, "blocks=", c.blocks_on_sm);
  JAX_TCGEMM_REQUIRE(c.shared_bytes() <= KernelConfig::kMaxSharedMemoryBytes, c.shared_bytes(),
                     " bytes a block");
  return Status();
}

namespace {

const char* layout_of(std::string_view program) {
  return program.empty() ? kPackedLayout : kPackedFunctionLayout;
}

}  // namespace

Status prepare_packed(const PackedConfig& config, std::string_view digest,
                      std::string_view program) {
  JAX_TCGEMM_RETURN_IF_ERROR(check_packed(config));
  std::shared_ptr<LoadedProgram> loaded;
  LoadedKernel* kernel = nullptr;
  return find(config, digest, program, layout_of(program), false, &loaded, &kernel);
}

Status prepare_unpack(const PackedConfig& config, std::string_view digest) {
  std::shared_ptr<LoadedProgram> loaded;
  LoadedKernel* kernel = nullptr;
  return find(config, digest, {}, kUnpackLayout, false, &loaded, &kernel);
}

Status run_unpack(const UnpackProblem& problem, cudaStream_t stream) {
  bool capturing = false;
  JAX_TCGEMM_RETURN_IF_ERROR(is_captured(stream, &capturing));
  std::shared_ptr<LoadedProgram> loaded;
  LoadedKernel* kernel = nullptr;
  JAX_TCGEMM_RETURN_IF_ERROR(
      find(problem.config, problem.digest, {}, kUnpackLayout, capturing, &loaded, &kernel));
  UnpackParams params = problem.params;
  const int64_t columns = ceil_div(int64_t{params.k_tiles}, int64_t{kUnpackTiles});
  const int64_t rows = ceil_div(int64_t{params.n}, int64_t{kPackedTile});
  JAX_TCGEMM_REQUIRE(rows <= kMaxGridRows && problem.batch <= kMaxGridRows, columns, " x ", rows,
                     " x ", problem.batch, " blocks");
  cudaLaunchConfig_t launch = {};
  launch.gridDim = dim3(static_cast<unsigned>(columns), static_cast<unsigned>(rows),
                        static_cast<unsigned>(problem.batch));
  launch.blockDim = dim3(kUnpackThreads);
  launch.stream = stream;
  void* arguments[] = {&params};
  JAX_TCGEMM_CUDA_CHECK(cudaLaunchKernelExC(&launch, kernel->made.handle.function, arguments),
                        "launching the pass that dequantizes: n=", params.n);
  return Status();
}

Status run_packed(const PackedProblem& problem, cudaStream_t stream) {
  const PackedConfig& config = problem.config;
  bool capturing = false;
  JAX_TCGEMM_RETURN_IF_ERROR(is_captured(stream, &capturing));
  std::shared_ptr<LoadedProgram> loaded;
  LoadedKernel* kernel = nullptr;
  JAX_TCGEMM_RETURN_IF_ERROR(find(config, problem.digest, problem.program,
                                  layout_of(problem.program), capturing, &loaded, &kernel));
  const void* const function = kernel->made.handle.function;
  PackedParams params = problem.params;
  sm90::TensorMap x;
  JAX_TCGEMM_RETURN_IF_ERROR(sm90::encode_packed_rows(
      problem.x, config.activation, problem.batch, params.m, int64_t{kPackedTile} * params.k_tiles,
      config.tokens, config.k_blocks, &x));
  JAX_TCGEMM_CUDA_CHECK(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             config.shared_bytes()),
                        config.shared_bytes(), " bytes");
  // Only the most tiles that groups of rows can have are known.
  const int64_t most = std::min(int64_t{params.m}, int64_t{params.experts} + 1);
  const int64_t grid_y =
      config.is_ragged ? (params.m + most * (config.tokens - 1)) / config.tokens : problem.batch;
  params.token_tiles = config.is_ragged ? 1 : ceil_div(params.m, config.tokens);
  const int64_t tiles = ceil_div(int64_t{params.n}, int64_t{config.columns()});
  const int64_t blocks = mul_sat(mul_sat(tiles, params.token_tiles), config.split_k);
  JAX_TCGEMM_REQUIRE(blocks <= std::numeric_limits<int32_t>::max() && grid_y <= kMaxGridRows,
                     blocks, " x ", grid_y, " blocks");
  cudaLaunchConfig_t launch = {};
  launch.gridDim = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(grid_y));
  launch.blockDim = dim3(config.threads());
  launch.dynamicSmemBytes = config.shared_bytes();
  launch.stream = stream;
  void* arguments[] = {&params, &x, const_cast<CompiledParams*>(problem.function)};
  JAX_TCGEMM_CUDA_CHECK(cudaLaunchKernelExC(&launch, function, arguments),
                        "launching a kernel for packed weights: m=", params.m, " n=", params.n);
  return Status();
}

}  // namespace jax_tcgemm
