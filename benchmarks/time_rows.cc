// Times the built rows of the kernel table beside the time model's expectation. The model's
// constants are fitted to these times (cuda/dispatch/sm90_time_model.cc).
//
//   cmake -S . -B build -DJAX_TCGEMM_TIME_ROWS=ON && cmake --build build --target time_rows
//   build/time_rows [--within FACTOR] [--rows GLOB] [--dense] < problems > times.csv
//
// A problem is a line "TYPE LAYOUT M N K BATCH EPILOGUE":
//   TYPE: bf16, f16 or tf32
//   LAYOUT: nn, nt, tn or tt
//   M, N, K: extents whose rows are multiples of 16 bytes
//   EPILOGUE: none, bias, bias+gelu, or f32, a float32 result without bias and gelu
// The program times the choices that the model has within FACTOR (2) of the fastest and whose names
// the glob matches. A choice is a row, or a row that splits k ("ROW/splits=N"; with --dense, N may
// be other than a power of two). A CUDA graph launches each choice many times, on so many sets of
// operands that L2 cannot hold all of them, at most 64. The time is that of one launch, including
// the gap before it. Choices take turns in random order, so that one choice's power draw slows all
// of them.

#include <cuda_runtime_api.h>
#include <fnmatch.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <iostream>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/ceil_div.h"
#include "dispatch/choice.h"
#include "dispatch/dispatch.h"
#include "dispatch/sm90_time_model.h"
#include "gemm_problem.h"
#include "shared_limits.h"

namespace jax_tcgemm {
namespace {

constexpr int64_t kCopiesBytes = 160 << 20;  // least size of all operand sets: beyond any L2
constexpr int kMostCopies = 64;
constexpr double kGraphMicroseconds = 1000.0;  // about, for a graph; sets take turns
constexpr int kMostLaunches = 100;
constexpr int kSamples = 5;  // graphs; the median counts
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
  bool is_wide() const { return epilogue == "f32"; }
  bool has_bias() const { return epilogue.starts_with("bias"); }

  // Returns true if the line has the format described at the top.
  bool is_known() const {
    const auto any = [](const std::string& word, std::initializer_list<const char*> words) {
      return std::find(words.begin(), words.end(), word) != words.end();
    };
    const auto aligned = [&](int64_t extent) { return extent > 0 && extent * bytes() % 16 == 0; };
    return any(type, {"bf16", "f16", "tf32"}) && any(layout, {"nn", "nt", "tn", "tt"}) &&
           any(epilogue, {"none", "bias", "bias+gelu", "f32"}) && m > 0 &&
           (layout[0] == 'n' || aligned(m)) && aligned(n) && aligned(k) && batch > 0;
  }
};

// Normal numbers in device memory; operands are pieces of them.
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
    check(cudaMalloc(&data_, kBytes), "cudaMalloc");
    for (int64_t at = 0; at < kBytes; at += bytes) {
      check(cudaMemcpy(data() + at, from, std::min(bytes, kBytes - at), cudaMemcpyDefault), "copy");
    }
  }
  ~Numbers() { cudaFree(data_); }
  char* data() const { return static_cast<char*>(data_); }
  static constexpr int64_t kBytes = int64_t{8} << 30;

 private:
  // Rounds towards zero, which is random enough.
  static uint16_t narrowed(float value, bool half) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (!half) return static_cast<uint16_t>(bits >> 16);
    const int exponent = static_cast<int>(bits >> 23 & 255) - 112;
    if (exponent <= 0) return static_cast<uint16_t>(bits >> 16 & 0x8000);
    return static_cast<uint16_t>((bits >> 16 & 0x8000) | exponent << 10 | (bits >> 13 & 0x3ff));
  }
  void* data_;
};

int64_t rounded_up(int64_t bytes) { return ceil_div(bytes, int64_t{1024}) * 1024; }

// Returns one set of operands, as the handlers would decode them.
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
  epilogue.d_type = c.is_wide() ? ElementType::kF32 : arithmetic_of(problem.algorithm).output;
  epilogue.d_vectorizable = true;
  if (c.has_bias()) epilogue.bias = {bias, 0, 1, {}, epilogue.d_type, true};
  if (c.epilogue == "bias+gelu") epilogue.activation = Activation::kGelu;
  return problem;
}

int64_t set_bytes(const Case& c) {
  const int64_t bytes = c.bytes();
  return rounded_up(c.batch * c.m * c.k * bytes) + rounded_up(c.batch * c.n * c.k * bytes) +
         rounded_up(c.n * bytes) + rounded_up(c.batch * c.m * c.n * (c.is_wide() ? 4 : bytes));
}

// A choice, as a graph of launches.
class Launches {
 public:
  // `launch(i)` launches the choice on operand set i, and returns false if that failed.
  template <typename Launch>
  static std::unique_ptr<Launches> capture(const Estimate& estimate, cudaStream_t stream,
                                           int copies, Launch&& launch) {
    if (!launch(0)) return nullptr;  // loads the code
    const double expected = estimate.cycles / kCyclesOfMicrosecond;
    auto launches = std::make_unique<Launches>();
    launches->config = config_of(estimate.choice);
    launches->cycles = estimate.cycles;
    launches->count_ =
        std::clamp(static_cast<int>(kGraphMicroseconds / expected), copies, kMostLaunches);
    cudaGraph_t graph;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    for (int i = 0; i < launches->count_; ++i) launch(i % copies);
    check(cudaStreamEndCapture(stream, &graph), "capture");
    check(cudaGraphInstantiate(&launches->exec_, graph, 0), "instantiate");
    check(cudaGraphDestroy(graph), "graph");
    check(cudaGraphLaunch(launches->exec_, stream), "graph");
    return launches;
  }
  ~Launches() { cudaGraphExecDestroy(exec_); }

  // Takes one sample.
  void time(cudaStream_t stream, cudaEvent_t begin, cudaEvent_t end) {
    float milliseconds;
    check(cudaEventRecord(begin, stream), "record");
    check(cudaGraphLaunch(exec_, stream), "graph");
    check(cudaEventRecord(end, stream), "record");
    check(cudaEventSynchronize(end), "kernel");
    check(cudaEventElapsedTime(&milliseconds, begin, end), "time");
    samples_.push_back(milliseconds);
  }

  // Returns the microseconds of one launch.
  double median() {
    std::sort(samples_.begin(), samples_.end());
    return 1000.0 * samples_[samples_.size() / 2] / count_;
  }

  std::string config;
  double cycles = 0.0;  // the model's expectation

 private:
  cudaGraphExec_t exec_ = nullptr;
  int count_ = 0;
  std::vector<float> samples_;
};

struct Options {
  double within = 2.0;
  std::string glob = "*";
  bool dense = false;
};

// Returns the workspace bytes for splitting k: see jax_tcgemm/problem/alignment.py.
int64_t workspace_bytes(const Case& c) {
  constexpr int64_t kMostSplits = 64;
  constexpr int64_t kSplitElements = int64_t{132} * 128 * 256;
  const int64_t splits = c.batch == 1 ? std::min(kMostSplits, kSplitElements / (c.m * c.n)) : 0;
  return splits > 1 ? splits * c.m * c.n * 4 + kFixupFlagBytes : 0;
}

// Prints a line for each choice.
void time_choices(const std::string& line, const Options& options, const DeviceProperties& device,
                  cudaStream_t stream, std::vector<GemmProblem> sets) {
  const std::vector<Estimate> ranked =
      ranked_choices(choice_input(sets[0], device, 0), options.dense);
  std::vector<std::unique_ptr<Launches>> choices;
  for (const Estimate& estimate : ranked) {
    if (estimate.cycles > options.within * ranked[0].cycles) break;
    if (!estimate.choice.is_built) continue;  // this program compiles no kernels
    const std::string config = config_of(estimate.choice);
    if (fnmatch(options.glob.c_str(), config.c_str(), 0) != 0) continue;
    auto choice = Launches::capture(estimate, stream, static_cast<int>(sets.size()), [&](int i) {
      sets[i].config = config;
      const Status status = run_gemm(sets[i], device, stream);
      if (!status.ok()) std::fprintf(stderr, "%s\n", status.message().c_str());
      return status.ok();
    });
    if (choice != nullptr) choices.push_back(std::move(choice));
  }
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  std::vector<Launches*> turns;
  for (const auto& choice : choices) turns.push_back(choice.get());
  std::mt19937 generator(1);
  for (int sample = 0; sample < kSamples; ++sample) {
    std::shuffle(turns.begin(), turns.end(), generator);
    for (Launches* choice : turns) choice->time(stream, begin, end);
  }
  check(cudaEventDestroy(begin), "event");
  check(cudaEventDestroy(end), "event");
  for (const auto& choice : choices) {
    std::printf("%s,%s,%.0f,%.3f\n", line.c_str(), choice->config.c_str(), choice->cycles,
                choice->median());
  }
  std::fflush(stdout);
}

// Times the problems on standard input.
void time_all(const Options& options, const DeviceProperties& device) {
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  std::unique_ptr<Numbers> numbers;
  std::string type;
  std::printf("problem,config,cycles,us\n");
  for (std::string line; std::getline(std::cin, line);) {
    Case c = {};
    std::istringstream words(line);
    words >> c.type >> c.layout >> c.m >> c.n >> c.k >> c.batch >> c.epilogue;
    const int64_t bytes = c.is_known() ? set_bytes(c) : 0;
    const int64_t room = c.is_known() ? workspace_bytes(c) : 0;
    const int copies = static_cast<int>(
        std::clamp<int64_t>(bytes > 0 ? ceil_div(kCopiesBytes, bytes) + 1 : 0, 2, kMostCopies));
    if (!c.is_known() || copies * bytes + room > Numbers::kBytes) {
      std::fprintf(stderr, "not known, or too large: %s\n", line.c_str());
      continue;
    }
    if (type != c.type) {
      numbers.reset();  // frees memory first: there is room for one type
      numbers = std::make_unique<Numbers>(c.type);
      type = c.type;
    }
    std::vector<GemmProblem> sets;
    for (int i = 0; i < copies; ++i) {
      sets.push_back(problem_of(c, numbers->data() + room + i * bytes, numbers->data(), room));
    }
    time_choices(line, options, device, stream, std::move(sets));
  }
}

}  // namespace
}  // namespace jax_tcgemm

int main(int argc, char** argv) {
  jax_tcgemm::Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view name = argv[i];
    if (name == "--within" && i + 1 < argc) {
      options.within = std::atof(argv[++i]);
    } else if (name == "--rows" && i + 1 < argc) {
      options.glob = argv[++i];
    } else if (name == "--dense") {
      options.dense = true;
    } else {
      std::fprintf(stderr, "%s: see the head of benchmarks/time_rows.cc\n", argv[i]);
      return 2;
    }
  }
  const jax_tcgemm::DeviceProperties* device = nullptr;
  const jax_tcgemm::Status found = jax_tcgemm::get_device_properties(0, &device);
  if (!found.ok()) {
    std::fprintf(stderr, "%s\n", found.message().c_str());
    return 1;
  }
  jax_tcgemm::time_all(options, *device);
  return 0;
}
