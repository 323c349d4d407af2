// The custom call of a product whose rows are gathered from other devices, or scattered to them,
// beside the product: see overlap/overlapped.h.
//
// Not capturable into a CUDA graph: each run meets the hosts of the other devices. XLA puts only
// handlers into a command buffer that have the trait for it; this one lacks it, and refuses a
// stream that somebody captures all the same.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>

#include "common/saturating.h"
#include "common/status.h"
#include "dispatch/device.h"
#include "epilogue/work.h"
#include "ffi/algorithm_names.h"
#include "ffi/attributes.h"
#include "ffi/element_types.h"
#include "ffi/gemm.h"
#include "ffi/handlers.h"
#include "ffi/operands.h"
#include "gemm_params.h"
#include "overlap/overlapped.h"

namespace jax_tcgemm {

// Set by jax_tcgemm/lowering/overlapped.py. `gemm` describes the product of all gathered rows, or a
// part of scattered rows. The operands are those of a product, then the rows of this device if rows
// are gathered, then the number of the device in its program.
struct OverlappedAttributes {
  GemmAttributes gemm;
  std::string_view kind;
  int64_t call;        // no other call of any compiled program has this number
  int64_t group_size;  // devices of a group
  Strides devices;     // numbers of the devices of each group, by rank
};

}  // namespace jax_tcgemm

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_tcgemm::OverlappedAttributes, JAX_TCGEMM_GEMM_MEMBERS,
                                      ::xla::ffi::StructMember<std::string_view>("kind"),
                                      ::xla::ffi::StructMember<int64_t>("call"),
                                      ::xla::ffi::StructMember<int64_t>("group_size"),
                                      ::xla::ffi::StructMember<::jax_tcgemm::Strides>("devices"));

namespace jax_tcgemm {
namespace {

// The kinds of exchange; lowering/overlapped.py has the same names.
enum class Kind { kRowsOfA, kRowsOfD, kSumOfD, kKOfA, kKOfB };

// Checks if the devices exchange parts of a sum.
bool scatters(Kind kind) { return kind == Kind::kRowsOfD || kind == Kind::kSumOfD; }

Status decode_kind(std::string_view name, Kind* kind) {
  if (name == "rows_of_a") {
    *kind = Kind::kRowsOfA;
  } else if (name == "rows_of_d") {
    *kind = Kind::kRowsOfD;
  } else if (name == "sum_of_d") {
    *kind = Kind::kSumOfD;
  } else if (name == "k_of_a") {
    *kind = Kind::kKOfA;
  } else {
    JAX_TCGEMM_REQUIRE(name == "k_of_b", "unknown kind '", name, "'");
    *kind = Kind::kKOfB;
  }
  return Status();
}

// The numbers of devices in the programs of calls.
struct Numbers {
  std::mutex mutex;
  std::map<int64_t, int> executables;  // that have a call
  std::map<std::pair<int64_t, int32_t>, int32_t> known;
  int64_t reads = 0;

  static Numbers& get() {
    static auto* const numbers = new Numbers();  // never freed: threads may outlive the interpreter
    return *numbers;
  }
};

// Reads the number of this device in the program, which only the program itself can tell.
//
// XLA compiles a program for an order of devices, so in one executable a device always has the same
// number, and the host waits for it once, in the first run. JAX's persistent cache, however, loads
// an executable again for the same devices in another order. Then several executables have the
// call, and the host waits for the number in each run.
//
// Waiting cannot hang: the peers have enqueued all that comes before this call, or will, without
// waiting for this device's host.
Status read_number(int64_t call, int32_t ordinal, const ffi::AnyBuffer& buffer, cudaStream_t stream,
                   int32_t* number) {
  Numbers& numbers = Numbers::get();
  {
    const std::lock_guard<std::mutex> lock(numbers.mutex);
    const auto found = numbers.known.find({call, ordinal});
    if (numbers.executables[call] == 1 && found != numbers.known.end()) {
      *number = found->second;
      return Status();
    }
  }
  JAX_TCGEMM_CUDA_CHECK(cudaMemcpyAsync(number, buffer.untyped_data(), sizeof(*number),
                                        cudaMemcpyDeviceToHost, stream),
                        "the number of device ", ordinal);
  JAX_TCGEMM_CUDA_CHECK(cudaStreamSynchronize(stream), "the number of device ", ordinal);
  const std::lock_guard<std::mutex> lock(numbers.mutex);
  numbers.known[{call, ordinal}] = *number;
  ++numbers.reads;
  return Status();
}

// Finds the group of a device, and its rank there.
Status decode_peers(const OverlappedAttributes& at, ffi::RemainingArgs& operands, int64_t run,
                    int32_t ordinal, Kind kind, cudaStream_t stream, Peers* peers) {
  const auto total = static_cast<int64_t>(at.devices.size());
  JAX_TCGEMM_REQUIRE(
      2 <= at.group_size && at.group_size <= kMostPeers && total % at.group_size == 0, total,
      " devices in groups of ", at.group_size);
  JAX_TCGEMM_REQUIRE(operands.size() >= 3, operands.size(), " operands");
  const auto buffer = operands.get<ffi::AnyBuffer>(operands.size() - 1);
  JAX_TCGEMM_REQUIRE(
      buffer.has_value() && buffer->element_type() == ffi::S32 && buffer->element_count() == 1,
      "the device's number is missing");
  int32_t number = 0;
  JAX_TCGEMM_RETURN_IF_ERROR(read_number(at.call, ordinal, *buffer, stream, &number));
  const auto found = std::find(at.devices.begin(), at.devices.end(), number);
  JAX_TCGEMM_REQUIRE(found != at.devices.end(), "no group has device ", number);
  const int64_t index = found - at.devices.begin();
  peers->key = {run, at.call, index / at.group_size};
  peers->count = static_cast<int>(at.group_size);
  peers->rank = static_cast<int>(index % at.group_size);
  const GemmAttributes& gemm = at.gemm;
  peers->signature = ((gemm.m * 31 + gemm.n) * 31 + gemm.k) * 4 + static_cast<int>(kind);
  return Status();
}

// Checks that A has the rows of all parts.
Status check_rows(const OverlappedAttributes& at, ffi::RemainingArgs& operands) {
  const auto a = operands.get<ffi::AnyBuffer>(0);
  AddressedSpan addressed;
  addressed.add_dimension(mul_sat(at.gemm.m, at.group_size), at.gemm.a_strides[0]);
  addressed.add_dimension(at.gemm.k, at.gemm.a_strides[1]);
  JAX_TCGEMM_REQUIRE(a.has_value() && addressed.elements() <= real_count(*a),
                     "a is addressed up to element ", addressed.elements());
  return Status();
}

// Reads the buffer of gathered rows, which is operand 0 or 1, and the rows of this device.
Status decode_rows(const OverlappedAttributes& at, Kind kind, ffi::RemainingArgs& operands,
                   GatheredRows* rows) {
  const auto all = operands.get<ffi::AnyBuffer>(kind == Kind::kKOfB ? 1 : 0);
  const auto own = operands.get<ffi::AnyBuffer>(operands.size() - 2);
  JAX_TCGEMM_REQUIRE(all.has_value() && own.has_value(), "no rows");
  *rows = {own->untyped_data(), static_cast<char*>(all->untyped_data()),
           static_cast<int64_t>(own->size_bytes()), static_cast<int64_t>(all->size_bytes())};
  const GemmAttributes& gemm = at.gemm;
  const int64_t divided = kind == Kind::kRowsOfA ? gemm.m : gemm.k;
  // The rows lie one after the other, so that those of a device do, too.
  const Strides strides = kind == Kind::kKOfB ? gemm.b_strides : gemm.a_strides;
  const bool is_first = kind != Kind::kKOfA;  // of the two dimensions
  const int64_t stride = strides[is_first ? 0 : 1];
  const int64_t length = kind == Kind::kRowsOfA ? gemm.k : kind == Kind::kKOfA ? gemm.m : gemm.n;
  const auto elements = static_cast<int64_t>(all->element_count());
  JAX_TCGEMM_REQUIRE(divided % at.group_size == 0 && rows->bytes % 16 == 0 &&
                         rows->bytes == mul_sat(rows->shard_bytes, at.group_size) &&
                         rows->shard_bytes % 16 == 0 && stride == length &&
                         strides[is_first ? 1 : 0] == 1 && elements == mul_sat(divided, length),
                     divided, " rows of ", length, " elements with stride ", stride, ", of which ",
                     at.group_size, " devices have ", rows->shard_bytes, " bytes each");
  return Status();
}

Status decode_result(ffi::RemainingRets& results, size_t index, int64_t elements,
                     EpilogueParams* epilogue, void** data) {
  auto result = results.get<ffi::AnyBuffer>(index);
  JAX_TCGEMM_REQUIRE(result.has_value(), "result ", index, " is missing");
  const ffi::AnyBuffer buffer = **result;
  JAX_TCGEMM_REQUIRE(real_count(buffer) == elements, "result ", index, " has ", real_count(buffer),
                     " elements, the problem ", elements);
  JAX_TCGEMM_RETURN_IF_ERROR(decode_type("D", buffer.element_type(), &epilogue->d_type));
  *data = buffer.untyped_data();
  return Status();
}

// Reads bytes that the lowering has allocated.
Status decode_bytes(ffi::RemainingRets& results, size_t index, int64_t least, void** data,
                    int64_t* bytes) {
  auto result = results.get<ffi::AnyBuffer>(index);
  JAX_TCGEMM_REQUIRE(result.has_value() && static_cast<int64_t>((*result)->size_bytes()) >= least,
                     "result ", index, " has no ", least, " bytes");
  *data = (*result)->untyped_data();
  *bytes = static_cast<int64_t>((*result)->size_bytes());
  return Status();
}

// Reads D and the further results, the scratch for the parts of peers, and the workspace.
Status decode_results(const OverlappedAttributes& at, Kind kind, ffi::RemainingRets& results,
                      GemmProblem* problem, void** scratch) {
  const int64_t part = mul_sat(at.gemm.m, at.gemm.n);
  const int64_t elements = kind == Kind::kSumOfD ? mul_sat(part, at.group_size) : part;
  EpilogueParams& epilogue = problem->params.epilogue;
  void** const pointers[] = {&epilogue.d, &epilogue.aux, &epilogue.aux2};
  const size_t matrices = !at.gemm.has_aux ? 1 : at.gemm.gated ? 3 : 2;
  size_t index = 0;
  for (; index < matrices; ++index) {
    JAX_TCGEMM_RETURN_IF_ERROR(decode_result(results, index, elements, &epilogue, pointers[index]));
  }
  if (scatters(kind)) {
    const int64_t least = mul_sat(mul_sat(part, element_bytes(epilogue.d_type)), at.group_size - 1);
    int64_t bytes = 0;
    JAX_TCGEMM_RETURN_IF_ERROR(decode_bytes(results, index++, least, scratch, &bytes));
  }
  if (at.gemm.has_workspace) {
    JAX_TCGEMM_RETURN_IF_ERROR(decode_bytes(results, index, at.gemm.padding_bytes,
                                            &problem->workspace, &problem->workspace_bytes));
    problem->padding_bytes = at.gemm.padding_bytes;
  }
  // The lowering sees to it that parts begin at multiples of 16 bytes.
  epilogue.d_vectorizable = at.gemm.n % kVectorColumns == 0;
  return Status();
}

Status check_part(const OverlappedAttributes& at, const GemmProblem& problem) {
  const int64_t bytes = part_bytes(problem);
  JAX_TCGEMM_REQUIRE(bytes > 0 && bytes % 16 == 0, "parts of ", bytes,
                     " bytes, which is no multiple of 16");
  JAX_TCGEMM_REQUIRE(is_plain(problem.params.epilogue) && !at.gemm.has_aux,
                     "an epilogue before a sum is complete");
  return Status();
}

Status decode_and_run(const OverlappedAttributes& at, ffi::RemainingArgs& operands,
                      ffi::RemainingRets& results, int64_t run, int32_t ordinal,
                      cudaStream_t stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  JAX_TCGEMM_CUDA_CHECK(cudaStreamIsCapturing(stream, &capture), "XLA's stream");
  JAX_TCGEMM_REQUIRE(capture == cudaStreamCaptureStatusNone,
                     "an overlapped product cannot be captured into a CUDA graph; set "
                     "JAX_TCGEMM_OVERLAP=off");
  const GemmAttributes& gemm = at.gemm;
  const auto algorithm = algorithm_from_name(gemm.algorithm);
  JAX_TCGEMM_REQUIRE(algorithm.has_value(), "unknown algorithm '", gemm.algorithm, "'");
  JAX_TCGEMM_REQUIRE(gemm.batch_shape.size() == 0, gemm.batch_shape.size(), " batch dimensions");
  Kind kind = Kind::kRowsOfA;
  JAX_TCGEMM_RETURN_IF_ERROR(decode_kind(at.kind, &kind));
  Peers peers;
  JAX_TCGEMM_RETURN_IF_ERROR(decode_peers(at, operands, run, ordinal, kind, stream, &peers));
  GemmProblem problem = {};
  problem.algorithm = *algorithm;
  problem.config = gemm.config;
  JAX_TCGEMM_RETURN_IF_ERROR(decode_shape(gemm, &problem.params));
  void* scratch = nullptr;
  JAX_TCGEMM_RETURN_IF_ERROR(decode_results(at, kind, results, &problem, &scratch));
  EpilogueParams& epilogue = problem.params.epilogue;
  JAX_TCGEMM_RETURN_IF_ERROR(decode_activation(gemm.activation, &epilogue.activation));
  epilogue.activation_parameters[0] = gemm.activation_p0;
  epilogue.activation_parameters[1] = gemm.activation_p1;
  JAX_TCGEMM_RETURN_IF_ERROR(decode_operands({gemm, operands, results}, &problem));
  const DeviceProperties* device = nullptr;
  JAX_TCGEMM_RETURN_IF_ERROR(get_device_properties(ordinal, &device));
  if (scatters(kind)) {
    JAX_TCGEMM_RETURN_IF_ERROR(check_part(at, problem));
    JAX_TCGEMM_RETURN_IF_ERROR(check_rows(at, operands));
    void* const sums = kind == Kind::kSumOfD ? epilogue.d : nullptr;
    return run_scattered(problem, scratch, sums, peers, *device, stream);
  }
  GatheredRows rows = {};
  JAX_TCGEMM_RETURN_IF_ERROR(decode_rows(at, kind, operands, &rows));
  return run_gathered(problem, kind == Kind::kRowsOfA, rows, peers, *device, stream);
}

ffi::Error overlapped(cudaStream_t stream, int32_t ordinal, ffi::RunId run,
                      ffi::RemainingArgs operands, ffi::RemainingRets results,
                      OverlappedAttributes attributes) {
  return as_error(decode_and_run(attributes, operands, results, run.run_id, ordinal, stream));
}

// XLA calls this once for each executable that it makes or loads.
ffi::Error instantiate_overlapped(ffi::RemainingArgs, ffi::RemainingRets results,
                                  OverlappedAttributes attributes) {
  static_cast<void>(begin_kernels(attributes.gemm, results));
  Numbers& numbers = Numbers::get();
  const std::lock_guard<std::mutex> lock(numbers.mutex);
  ++numbers.executables[attributes.call];
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kOverlappedHandler, overlapped,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Ctx<ffi::RunId>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs<OverlappedAttributes>());

XLA_FFI_DEFINE_HANDLER(
    kInstantiateHandler, instantiate_overlapped,
    ffi::Ffi::BindInstantiate().RemainingArgs().RemainingRets().Attrs<OverlappedAttributes>());

}  // namespace

int64_t overlapped_number_reads() {
  Numbers& numbers = Numbers::get();
  const std::lock_guard<std::mutex> lock(numbers.mutex);
  return numbers.reads;
}

void* overlapped_handler() { return reinterpret_cast<void*>(+kOverlappedHandler); }
void* overlapped_instantiate_handler() { return reinterpret_cast<void*>(+kInstantiateHandler); }

}  // namespace jax_tcgemm
