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

// Set by jax_tcgemm/lowering/overlapped.py. `gemm` describes a part. The operands are those of a
// product, then the number of the device in its program.
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
enum class Kind { kRowsOfA, kRowsOfD, kKOfA, kKOfB };

Status decode_kind(std::string_view name, Kind* kind) {
  if (name == "rows_of_a") {
    *kind = Kind::kRowsOfA;
  } else if (name == "rows_of_d") {
    *kind = Kind::kRowsOfD;
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

// Checks that an operand with these strides has so many rows and columns.
Status check_span(const char* name, ffi::RemainingArgs& operands, size_t index, int64_t rows,
                  int64_t columns, int64_t row_stride, int64_t column_stride) {
  const auto buffer = operands.get<ffi::AnyBuffer>(index);
  AddressedSpan addressed;
  addressed.add_dimension(rows, row_stride);
  addressed.add_dimension(columns, column_stride);
  JAX_TCGEMM_REQUIRE(buffer.has_value() && addressed.elements() <= real_count(*buffer), name,
                     " is addressed up to element ", addressed.elements());
  return Status();
}

// Checks the operands of which a device has all parts.
Status check_spans(const OverlappedAttributes& at, Kind kind, ffi::RemainingArgs& operands) {
  const GemmAttributes& gemm = at.gemm;
  const int64_t rows = mul_sat(gemm.m, at.group_size), k = mul_sat(gemm.k, at.group_size);
  const Strides a = gemm.a_strides, b = gemm.b_strides, c = gemm.c_strides;
  if (kind == Kind::kRowsOfD) return check_span("a", operands, 0, rows, gemm.k, a[0], a[1]);
  if (kind == Kind::kKOfB) return check_span("a", operands, 0, gemm.m, k, a[0], a[1]);
  if (kind == Kind::kKOfA) return check_span("b", operands, 1, k, gemm.n, b[0], b[1]);
  // The operands lie in this order; those that have rows are checked.
  size_t index = 2;
  if (gemm.has_c) {
    JAX_TCGEMM_RETURN_IF_ERROR(check_span("c", operands, index++, rows, gemm.n, c[0], c[1]));
  }
  index += gemm.has_bias + gemm.has_alpha + gemm.has_beta;
  if (gemm.has_row_scale) {
    JAX_TCGEMM_RETURN_IF_ERROR(
        check_span("row_scale", operands, index++, rows, 1, gemm.row_scale_strides[0], 0));
  }
  index += gemm.has_column_scale + gemm.has_b2 + gemm.has_bias2;
  return gemm.has_c2 ? check_span("c2", operands, index, rows, gemm.n, c[0], c[1]) : Status();
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

// Reads D and the further results, the scratch, and the workspace.
Status decode_results(const OverlappedAttributes& at, Kind kind, ffi::RemainingRets& results,
                      GemmProblem* problem, void** scratch) {
  const int64_t part = mul_sat(at.gemm.m, at.gemm.n);
  const int64_t elements = kind == Kind::kRowsOfA ? mul_sat(part, at.group_size) : part;
  EpilogueParams& epilogue = problem->params.epilogue;
  void** const pointers[] = {&epilogue.d, &epilogue.aux, &epilogue.aux2};
  const size_t matrices = !at.gemm.has_aux ? 1 : at.gemm.gated ? 3 : 2;
  size_t index = 0;
  for (; index < matrices; ++index) {
    JAX_TCGEMM_RETURN_IF_ERROR(decode_result(results, index, elements, &epilogue, pointers[index]));
  }
  if (kind != Kind::kRowsOfA) {
    // The parts for the peers, or a sum in float32.
    const int64_t least = kind == Kind::kRowsOfD
                              ? mul_sat(part * element_bytes(epilogue.d_type), at.group_size - 1)
                              : mul_sat(part, sizeof(float));
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

Status check_parts(const OverlappedAttributes& at, Kind kind, const GemmProblem& problem,
                   int64_t shard_bytes) {
  const int64_t bytes = part_bytes(problem);
  JAX_TCGEMM_REQUIRE(at.gemm.batch_shape.size() == 0, at.gemm.batch_shape.size(),
                     " batch dimensions");
  JAX_TCGEMM_REQUIRE(bytes > 0 && bytes % 16 == 0 && shard_bytes % 16 == 0, "parts of ", bytes,
                     " bytes and shards of ", shard_bytes, ", which are no multiples of 16");
  JAX_TCGEMM_REQUIRE(kind == Kind::kRowsOfA || is_plain(problem.params.epilogue),
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
  // A shard, except for scattered rows.
  const auto shard = operands.get<ffi::AnyBuffer>(kind == Kind::kKOfB ? 1 : 0);
  const auto shard_bytes = static_cast<int64_t>(shard->size_bytes());
  JAX_TCGEMM_RETURN_IF_ERROR(check_parts(at, kind, problem, shard_bytes));
  JAX_TCGEMM_RETURN_IF_ERROR(check_spans(at, kind, operands));
  const DeviceProperties* device = nullptr;
  JAX_TCGEMM_RETURN_IF_ERROR(get_device_properties(ordinal, &device));
  if (kind == Kind::kRowsOfA) return run_gathered(problem, shard_bytes, peers, *device, stream);
  if (kind == Kind::kRowsOfD) return run_scattered(problem, scratch, peers, *device, stream);
  return run_gathered_sum(problem, kind == Kind::kKOfB, shard_bytes, static_cast<float*>(scratch),
                          peers, *device, stream);
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
