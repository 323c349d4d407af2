#include "dispatch/launch.h"

#include <stdint.h>

#include <algorithm>

#include "common/ceil_div.h"
#include "compiled_params.h"
#include "dispatch/ragged.h"
#include "epilogue/work.h"
#include "mma_sync/layouts.h"
#include "shared_limits.h"
#include "simt/fallback_tiles.h"
#include "simt/plain_params.h"
#include "sm80/direct_params.h"
#include "sm90/tensor_maps.h"

namespace jax_tcgemm {
namespace {

// Enqueues a kernel; the arguments follow the order of its parameters.
template <typename... Arguments>
cudaError_t enqueue(const cudaLaunchConfig_t& launch, const KernelHandle& kernel,
                    Arguments&... arguments) {
  void* addresses[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
  return cudaLaunchKernelExC(&launch, kernel.function, addresses);
}

cudaLaunchConfig_t launch_config(const KernelConfig& config, cudaStream_t stream) {
  cudaLaunchConfig_t launch = {};
  launch.blockDim = dim3(config.threads());
  launch.dynamicSmemBytes = config.shared_memory_bytes();
  launch.stream = stream;
  return launch;
}

// Stores in `count` what `ask` finds for the kernel on this device, and caches it.
template <typename Ask>
cudaError_t resident(KernelHandle* kernel, const KernelConfig& config, int device, int* count,
                     Ask&& ask) {
  const bool cacheable = device < kMaxDevices;
  *count = cacheable ? __atomic_load_n(&kernel->resident[device], __ATOMIC_RELAXED) : 0;
  if (*count > 0) return cudaSuccess;
  cudaError_t error = cudaFuncSetAttribute(
      kernel->function, cudaFuncAttributeMaxDynamicSharedMemorySize, config.shared_memory_bytes());
  if (error == cudaSuccess) error = ask(count);
  if (error == cudaSuccess && *count < 1) error = cudaErrorLaunchOutOfResources;
  if (error == cudaSuccess && cacheable) {
    __atomic_store_n(&kernel->resident[device], *count, __ATOMIC_RELAXED);
  }
  return error;
}

// Sets the step of a grid of `blocks` blocks (sm90: clusters), each of which has a tile.
void set_stride(GemmParams* params, int blocks) {
  params->raster.stride_batch = blocks / params->raster.tiles.divisor;
  params->raster.stride_index = blocks % params->raster.tiles.divisor;
}

int64_t tile_count(const GemmParams& params) {
  return int64_t{params.raster.tiles.divisor} * params.batch;
}

// Returns the number of clusters of a persistent grid beside collectives; `capacity` of them run at
// once. A tile belongs to a cluster from the start, so a cluster that waits for the end of a
// collective still has all its tiles to do. Therefore the grid has more clusters with fewer tiles,
// which the GPU places as others end, in the same order. Without collectives this costs 1 to 2 % of
// a product, and more if the epilogue is long.
int clusters_of_generations(const KernelConfig& config, const GemmParams& params, int64_t tiles,
                            int capacity) {
  constexpr double kGenerationCycles = 225e3;  // 150 us under load
  const int64_t k_tiles =
      params.split_stages > 0 ? params.split_stages : ceil_div(params.k, config.tile_k);
  const double tile_cycles =
      config.tile_m * config.tile_n / 32.0 * k_tiles / static_cast<double>(config.split_k);
  const int64_t rounds = ceil_div(tiles, int64_t{capacity});
  const int64_t least = config.schedule == Schedule::kPingpong ? 2 : 1;  // a tile for each consumer
  const int64_t most = std::max(least, ceil_div(rounds, int64_t{2}));
  const auto rounds_at_once =
      std::clamp(static_cast<int64_t>(kGenerationCycles / tile_cycles), least, most);
  const int64_t clusters = capacity * ceil_div(rounds, rounds_at_once);
  return static_cast<int>(std::min(tiles, clusters));
}

// A launch of one cluster. The second attribute, a cooperative launch, is not counted yet.
struct ClusterLaunch {
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t launch;

  ClusterLaunch(const KernelConfig& config, cudaStream_t stream)
      : launch(launch_config(config, stream)) {
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {static_cast<unsigned>(config.cluster_size()), 1, 1};
    attributes[1].id = cudaLaunchAttributeCooperative;
    attributes[1].val.cooperative = 1;
    launch.gridDim = dim3(config.cluster_size());
    launch.attrs = attributes;
    launch.numAttrs = 1;
  }
  ClusterLaunch(const ClusterLaunch&) = delete;
  ClusterLaunch& operator=(const ClusterLaunch&) = delete;
};

// Stores the number of clusters that run at once.
cudaError_t find_capacity(const KernelConfig& config, KernelHandle* kernel, int device,
                          const cudaLaunchConfig_t& launch, int* capacity) {
  return resident(kernel, config, device, capacity, [&](int* clusters) {
    return cudaOccupancyMaxActiveClusters(clusters, kernel->function, &launch);
  });
}

// Launches an sm90 kernel. `Params` is the type of request.params.
template <typename Params = GemmParams>
cudaError_t launch_sm90(const KernelConfig& config, KernelHandle* kernel,
                        const LaunchRequest& request) {
  ClusterLaunch of_clusters(config, request.stream);
  cudaLaunchConfig_t& launch = of_clusters.launch;
  int capacity = 0;
  const cudaError_t error =
      find_capacity(config, kernel, request.device.ordinal, launch, &capacity);
  if (error != cudaSuccess) return error;

  Params params = static_cast<const Params&>(request.params);
  params.k_major_a = request.maps->major_a == Major::kK;
  params.k_major_b = request.maps->major_b == Major::kK;
  int clusters = capacity;
  if (config.grouped != Grouped::kNone) {
    if (config.streams_b()) clusters = static_cast<int>(most_ragged_tiles(params, config));
  } else {
    const int64_t tiles = tile_count(params);
    if (params.fixup.parts > 0) {  // blocks wait for one another
      if (tiles > capacity) return cudaErrorCooperativeLaunchTooLarge;
      launch.numAttrs = 2;
    }
    if (config.streams_b()) {  // blocks have one tile each
      if (tiles > INT32_MAX / config.cluster_size()) return cudaErrorInvalidConfiguration;
      clusters = static_cast<int>(tiles);
    } else if (request.beside_collectives && !config.skinny && params.fixup.parts == 0) {
      clusters = clusters_of_generations(config, params, tiles, capacity);
    } else {
      clusters = static_cast<int>(std::min<int64_t>(tiles, capacity));
    }
    set_stride(&params, clusters);
  }
  launch.gridDim = dim3(clusters * config.cluster_size());
  return enqueue(launch, *kernel, params, *request.maps);
}

// Returns the build's sm90 kernel for a request. For a skinny row the descriptors say which operand
// is the longer one.
KernelHandle* sm90_kernel(const KernelConfig& config, const KernelSet& kernels,
                          const LaunchRequest& request) {
  const sm90::TensorMaps& maps = *request.maps;
  const Major a = config.skinny ? maps.major_a : request.major_a;
  const Major b = config.skinny ? maps.major_b : request.major_b;
  const bool is_simple = maps.finish < sm90::Finish::kActivate;
  KernelHandle* const simple = is_simple ? kernels.simple(a, b) : nullptr;
  return simple != nullptr ? simple : kernels.any(a, b);
}

// Launches a persistent grid of a kernel that takes `arguments` after the parameters. `Params` is
// the type of request.params.
template <typename Params = GemmParams, typename... Arguments>
cudaError_t launch_persistent(const KernelConfig& config, KernelHandle* kernel,
                              const LaunchRequest& request, Arguments&... arguments) {
  int blocks_per_sm = 0;
  const cudaError_t error =
      resident(kernel, config, request.device.ordinal, &blocks_per_sm, [&](int* blocks) {
        return cudaOccupancyMaxActiveBlocksPerMultiprocessor(
            blocks, kernel->function, config.threads(), config.shared_memory_bytes());
      });
  if (error != cudaSuccess) return error;
  Params params = static_cast<const Params&>(request.params);
  const int64_t capacity = int64_t{blocks_per_sm} * request.device.sm_count;
  const int blocks = static_cast<int>(std::min(tile_count(params), capacity));
  set_stride(&params, blocks);
  cudaLaunchConfig_t launch = launch_config(config, request.stream);
  launch.gridDim = dim3(blocks);
  return enqueue(launch, *kernel, params, arguments...);
}

cudaError_t launch_fallback(const KernelConfig& config, const KernelHandle& kernel,
                            const LaunchRequest& request) {
  constexpr int64_t kBlocksPerSm = 16;  // not all of them need to run at once
  const int64_t tiles = simt::fallback_tiles(request.params, config);
  cudaLaunchConfig_t launch = launch_config(config, request.stream);
  launch.gridDim =
      dim3(static_cast<unsigned>(std::min(tiles, kBlocksPerSm * request.device.sm_count)));
  bool k_major_a = request.major_a == Major::kK;
  bool k_major_b = request.major_b == Major::kK;
  return enqueue(launch, kernel, request.params, k_major_a, k_major_b);
}

// Checks if a simt row computes one product of two matrices and nothing else: its kernel for that
// takes PlainParams.
bool takes_plain(const KernelConfig& config, const GemmParams& params) {
  return !config.is_fallback() && params.batch == 1 && is_plain(params.epilogue) &&
         ceil_div(params.m, config.tile_m) <= kMaxGridRows;
}

cudaError_t launch_simt(const KernelConfig& config, KernelHandle* kernel,
                        const LaunchRequest& request) {
  if (config.is_fallback()) return launch_fallback(config, *kernel, request);
  const GemmParams& params = request.params;
  if (!takes_plain(config, params)) return launch_persistent(config, kernel, request);
  simt::PlainParams plain = {params.a.data, params.b.data, params.epilogue.d,
                             params.a.ld,   params.b.ld,   params.m,
                             params.n,      params.k,      params.epilogue.d_type};
  cudaLaunchConfig_t launch = launch_config(config, request.stream);
  launch.gridDim = dim3(static_cast<unsigned>(ceil_div(params.n, config.tile_n)),
                        static_cast<unsigned>(ceil_div(params.m, config.tile_m)));
  return enqueue(launch, *kernel, plain);
}

cudaError_t launch_direct(const KernelConfig& config, KernelHandle* kernel,
                          const LaunchRequest& request) {
  const GemmParams& params = request.params;
  cudaLaunchConfig_t launch = launch_config(config, request.stream);
  launch.gridDim = dim3(static_cast<unsigned>(ceil_div(params.n, config.tile_n)),
                        static_cast<unsigned>(ceil_div(params.m, config.tile_m)),
                        static_cast<unsigned>(params.batch));
  if (!takes_line(params)) {
    mma_sync::Layouts layouts = {request.major_a, request.major_b};
    return enqueue(launch, *kernel, params, layouts);
  }
  const auto batch_stride = [&](const Operand& operand) {
    return params.batch_rank == 0 ? 0 : operand.batch.stride[0];
  };
  const EpilogueParams& epilogue = params.epilogue;
  sm80::DirectParams line = {.a = params.a.data,
                             .b = params.b.data,
                             .d = epilogue.d,
                             .ld_a = params.a.ld,
                             .ld_b = params.b.ld,
                             .batch_a = batch_stride(params.a),
                             .batch_b = batch_stride(params.b),
                             .m = params.m,
                             .n = params.n,
                             .k = params.k,
                             .alpha = epilogue.alpha.value,
                             .d_type = epilogue.d_type,
                             .d_vectorizable = epilogue.d_vectorizable,
                             .bias = epilogue.bias};
  return enqueue(launch, *kernel, line);
}

}  // namespace

bool takes_line(const GemmParams& params) {
  const EpilogueParams& epilogue = params.epilogue;
  return params.batch_rank <= 1 && work_of(epilogue) <= EpilogueWork::kSum &&
         epilogue.c.data == nullptr && epilogue.alpha.data == nullptr;
}

KernelHandle* built_kernel(const KernelConfig& config, const KernelSet& kernels,
                           const LaunchRequest& request) {
  const Major a = request.major_a;
  const Major b = request.major_b;
  switch (config.arch) {
    case Arch::kSm90:
      return sm90_kernel(config, kernels, request);
    case Arch::kSm75:
    case Arch::kSm80:
      return config.is_direct() && takes_line(request.params) ? kernels.simple(a, b)
                                                              : kernels.any(a, b);
    case Arch::kSimt:
      return takes_plain(config, request.params) ? kernels.simple(a, b) : kernels.any(a, b);
  }
  return nullptr;
}

cudaError_t launch_kernel(const KernelConfig& config, KernelHandle* kernel,
                          const LaunchRequest& request) {
  if (kernel == nullptr) return cudaErrorNotSupported;
  switch (config.arch) {
    case Arch::kSm90:
      return launch_sm90(config, kernel, request);
    case Arch::kSm75:
    case Arch::kSm80: {
      if (config.is_direct()) return launch_direct(config, kernel, request);
      mma_sync::Layouts layouts = {request.major_a, request.major_b};
      return launch_persistent(config, kernel, request, layouts);
    }
    case Arch::kSimt:
      return launch_simt(config, kernel, request);
  }
  return cudaErrorInvalidValue;
}

bool fits_at_once(const KernelConfig& config, KernelHandle* kernel, const GemmParams& params,
                  const DeviceProperties& device) {
  const ClusterLaunch of_clusters(config, nullptr);
  int capacity = 0;
  const cudaError_t error =
      find_capacity(config, kernel, device.ordinal, of_clusters.launch, &capacity);
  return error == cudaSuccess && tile_count(params) <= capacity;
}

cudaError_t launch_compiled(const KernelConfig& config, KernelHandle* kernel,
                            const LaunchRequest& request) {
  if (config.arch == Arch::kSm90) return launch_sm90<CompiledParams>(config, kernel, request);
  mma_sync::Layouts layouts = {request.major_a, request.major_b};
  return launch_persistent<CompiledParams>(config, kernel, request, layouts);
}

}  // namespace jax_tcgemm
