// Times rows of the kernel table beside what the model expects of them: what its constants are
// fitted to (cuda/dispatch/sm90_time_model.cc).
//
//   cmake --build build --target time_rows
//   time_rows [--within FACTOR] [--rows GLOB] [--dense] < problems > times.csv
//
// A problem is a line "TYPE LAYOUT M N K BATCH EPILOGUE": bf16, f16 or tf32; nn, nt, tn or tt;
// none, bias or bias+gelu. Of each, those choices are timed that the model has within FACTOR of the
// fastest (2), and whose names the glob matches: rows, and rows that split k ("ROW/splits=N"; with
// --dense into other numbers than powers of two, too). Each is launched many times by a CUDA graph,
// on operands that L2 cannot hold together; the time is of one launch, the gap before it included.

#include <cuda_runtime_api.h>
#include <fnmatch.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "common/ceil_div.h"
#include "dispatch/choice.h"
#include "dispatch/dispatch.h"
#include "gemm_problem.h"

namespace jax_tcgemm {
namespace {

constexpr int64_t kCopiesBytes = 160 << 20;  // of all sets of operands, at least: beyond any L2
constexpr int kMostCopies = 64;
constexpr double kGraphMicroseconds = 1000.0;  // of a graph, about, but for its
constexpr int kLeastLaunches = 4;              // launches,
constexpr int kMostLaunches = 40;
constexpr int kSamples = 5;  // and graphs of which the median counts
constexpr double kCyclesOfMicrosecond = 1755.0;

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

struct Case {
  std::string type, layout, epilogue;
  int64_t m, n, k, batch;

  Algorithm algorithm() const {
    return type == "bf16"  ? Algorithm::kBf16Bf16F32
           : type == "f16" ? Algorithm::kF16F16F32
                           : Algorithm::kTf32Tf32F32;
  }
  int bytes() const { return type == "tf32" ? 4 : 2; }
};

// Normal numbers in memory of the device, of which operands are pieces.
class Numbers {
 public:
  explicit Numbers(const std::string& type) {
    constexpr int64_t kCount = 1 << 22;
    std::mt19937 generator(1);
    std::normal_distribution<float> normal;
    std::vector<float> values(kCount);
    for (float& value : values) value = normal(generator);
    std::vector<uint16_t> narrow;
    const void* from = values.data();
    if (type != "tf32") {
      narrow.resize(kCount);
      for (int64_t i = 0; i < kCount; ++i) narrow[i] = narrowed(values[i], type == "f16");
      from = narrow.data();
    }
    const int64_t bytes = kCount * (type == "tf32" ? 4 : 2);
    check(cudaMalloc(reinterpret_cast<void**>(&data_), kBytes), "cudaMalloc");
    for (int64_t at = 0; at < kBytes; at += bytes) {
      check(cudaMemcpy(data_ + at, from, std::min(bytes, kBytes - at), cudaMemcpyDefault), "copy");
    }
  }
  char* data() const { return data_; }
  static constexpr int64_t kBytes = int64_t{8} << 30;

 private:
  // Rounded towards zero, which is random enough.
  static uint16_t narrowed(float value, bool half) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (!half) return static_cast<uint16_t>(bits >> 16);
    const int exponent = static_cast<int>(bits >> 23 & 255) - 112;
    if (exponent <= 0) return static_cast<uint16_t>(bits >> 16 & 0x8000);
    return static_cast<uint16_t>((bits >> 16 & 0x8000) | exponent << 10 | (bits >> 13 & 0x3ff));
  }
  char* data_;
};

int64_t rounded_up(int64_t bytes) { return ceil_div(bytes, int64_t{1024}) * 1024; }

// One set of operands, as the handlers would decode them.
GemmProblem problem_of(const Case& c, char* memory, char* workspace, int64_t workspace_bytes) {
  const int64_t bytes = c.bytes();
  char* const a = memory;
  char* const b = a + rounded_up(c.batch * c.m * c.k * bytes);
  char* const bias = b + rounded_up(c.batch * c.n * c.k * bytes);
  char* const d = bias + rounded_up(c.n * bytes);
  GemmProblem problem = {};
  problem.algorithm = c.algorithm();
  problem.major_a = c.layout[0] == 'n' ? Major::kK : Major::kMn;
  problem.major_b = c.layout[1] == 'n' ? Major::kMn : Major::kK;
  problem.aligned_a = problem.aligned_b = true;
  problem.strides_aligned_a = problem.strides_aligned_b = true;
  problem.workspace = workspace;
  problem.workspace_bytes = workspace_bytes;
  GemmParams& p = problem.params;
  p.m = static_cast<int32_t>(c.m);
  p.n = static_cast<int32_t>(c.n);
  p.k = static_cast<int32_t>(c.k);
  p.batch = static_cast<int32_t>(c.batch);
  p.batch_rank = c.batch > 1 ? 1 : 0;
  p.batch_shape[0] = p.batch;
  p.a = {a, problem.major_a == Major::kK ? c.k : c.m, c.batch * c.m * c.k, {{c.m * c.k}}};
  p.b = {b, problem.major_b == Major::kK ? c.k : c.n, c.batch * c.n * c.k, {{c.n * c.k}}};
  EpilogueParams& epilogue = p.epilogue;
  epilogue.alpha.value = 1.f;
  epilogue.d = d;
  epilogue.d_type = arithmetic_of(problem.algorithm).output;
  epilogue.d_vectorizable = true;
  if (c.epilogue != "none") epilogue.bias = {bias, 0, 1, {}, epilogue.d_type, true};
  if (c.epilogue == "bias+gelu") epilogue.activation = Activation::kGelu;
  return problem;
}

int64_t set_bytes(const Case& c) {
  const int64_t bytes = c.bytes();
  return rounded_up(c.batch * c.m * c.k * bytes) + rounded_up(c.batch * c.n * c.k * bytes) +
         rounded_up(c.n * bytes) + rounded_up(c.batch * c.m * c.n * bytes);
}

// Microseconds of one launch, of which so many are expected; negative: it failed.
template <typename Launch>
double time_launches(cudaStream_t stream, int copies, double expected, Launch&& launch) {
  const int launches =
      std::clamp(static_cast<int>(kGraphMicroseconds / expected), kLeastLaunches, kMostLaunches);
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  if (!launch(0)) return -1.0;  // loads the code
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  for (int i = 0; i < launches; ++i) launch(i % copies);
  check(cudaStreamEndCapture(stream, &graph), "capture");
  check(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  std::vector<float> samples(kSamples);
  check(cudaGraphLaunch(exec, stream), "graph");
  for (float& sample : samples) {
    check(cudaEventRecord(begin, stream), "record");
    check(cudaGraphLaunch(exec, stream), "graph");
    check(cudaEventRecord(end, stream), "record");
    check(cudaEventSynchronize(end), "kernel");
    check(cudaEventElapsedTime(&sample, begin, end), "time");
  }
  check(cudaEventDestroy(begin), "event");
  check(cudaEventDestroy(end), "event");
  check(cudaGraphExecDestroy(exec), "graph");
  check(cudaGraphDestroy(graph), "graph");
  std::sort(samples.begin(), samples.end());
  return 1000.0 * samples[kSamples / 2] / launches;
}

}  // namespace
}  // namespace jax_tcgemm

#ifdef JAX_TCGEMM_RIVAL
#include JAX_TCGEMM_RIVAL
#endif

int main(int argc, char** argv) {
  using namespace jax_tcgemm;
  double within = 2.0;
  std::string glob = "*";
  bool dense = false;
  for (int i = 1; i < argc; ++i) {
    if (!std::strcmp(argv[i], "--within") && i + 1 < argc)
      within = std::atof(argv[++i]);
    else if (!std::strcmp(argv[i], "--rows") && i + 1 < argc)
      glob = argv[++i];
    else if (!std::strcmp(argv[i], "--dense"))
      dense = true;
    else
      return std::fprintf(stderr, "see the head of benchmarks/time_rows.cc\n"), 2;
  }
  const DeviceProperties* device = nullptr;
  const Status found = get_device_properties(0, &device);
  if (!found.ok()) return std::fprintf(stderr, "%s\n", found.message().c_str()), 1;
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  constexpr int64_t kWorkspaceBytes = int64_t{4} * 132 * 128 * 256 * 4 + 8192;
  char* workspace;
  check(cudaMalloc(reinterpret_cast<void**>(&workspace), kWorkspaceBytes), "workspace");
  std::string loaded;
  char* memory = nullptr;
  std::printf("problem,config,cycles,us\n");
  for (std::string line; std::getline(std::cin, line);) {
    Case c;
    std::istringstream words(line);
    if (!(words >> c.type >> c.layout >> c.m >> c.n >> c.k >> c.batch >> c.epilogue)) continue;
    if (loaded != c.type) {
      if (memory != nullptr) check(cudaFree(memory), "cudaFree");
      memory = Numbers(c.type).data();
      loaded = c.type;
    }
    const int64_t bytes = set_bytes(c);
    const int copies =
        static_cast<int>(std::clamp<int64_t>(ceil_div(kCopiesBytes, bytes) + 1, 2, kMostCopies));
    if (copies * bytes > Numbers::kBytes) {
      std::fprintf(stderr, "too large: %s\n", line.c_str());
      continue;
    }
    const int64_t results = c.m * c.n * 4;
    const int64_t splits =
        c.batch == 1 ? std::min<int64_t>(64, int64_t{132} * 128 * 256 / (c.m * c.n)) : 0;
    const int64_t room = splits > 1 ? std::min(kWorkspaceBytes, splits * results + 8192) : 0;
    std::vector<GemmProblem> sets;
    for (int i = 0; i < copies; ++i) {
      sets.push_back(problem_of(c, memory + i * bytes, workspace, room));
    }
    const std::vector<Estimate> ranked = ranked_choices(choice_input(sets[0], *device, 0), dense);
    for (const Estimate& estimate : ranked) {
      if (estimate.cycles > within * ranked[0].cycles) break;
      const std::string config = config_of(estimate.choice);
      if (fnmatch(glob.c_str(), config.c_str(), 0) != 0) continue;
      const double expected = estimate.cycles / kCyclesOfMicrosecond;
      const double us = time_launches(stream, copies, expected, [&](int i) {
        sets[i].config = config;
        const Status status = run_gemm(sets[i], *device, stream);
        if (!status.ok()) std::fprintf(stderr, "%s\n", status.message().c_str());
        return status.ok();
      });
      std::printf("%s,%s,%.0f,%.3f\n", line.c_str(), config.c_str(), estimate.cycles, us);
    }
#ifdef JAX_TCGEMM_RIVAL
    time_rival(c, line, sets, stream, copies, ranked[0].cycles / kCyclesOfMicrosecond);
#endif
    std::fflush(stdout);
  }
  return 0;
}
