// The custom call of a product whose rows are gathered from other devices, or scattered to them,
// beside the product: see overlap/overlapped.h.
//
// Not capturable into a CUDA graph: each run meets the hosts of the other devices. XLA puts only
// handlers into a command buffer that have the trait for it; this one lacks it, and refuses a
// stream that somebody captures all the same.

#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "common/saturating.h"
#include "common/status.h"
#include "dispatch/device.h"
#include "dispatch/dispatch.h"
#include "epilogue/work.h"
#include "ffi/algorithm_names.h"
#include "ffi/attributes.h"
#include "ffi/element_types.h"
#include "ffi/gemm.h"
#include "ffi/handlers.h"
#include "ffi/operands.h"
#include "ffi/peers.h"
#include "gemm_params.h"
#include "overlap/overlapped.h"

namespace jax_tcgemm {

// Set by jax_tcgemm/lowering/overlapped.py. `gemm` describes the product of all gathered rows, or a
// part of scattered rows. The operands are those of a product, then the rows of this device if rows
// are gathered, then the number of the device in its program.
struct OverlappedAttributes {
  GemmAttributes gemm;
  std::string_view kind;
  int64_t call, group_size;
  Strides devices;

  PeersAttributes peers() const { return {call, group_size, devices}; }
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

Status decode_gathered(const OverlappedAttributes& at, Kind kind, ffi::RemainingArgs& operands,
                       GatheredRows* rows) {
  const GemmAttributes& gemm = at.gemm;
  const Strides a = gemm.a_strides, b = gemm.b_strides;
  if (kind == Kind::kRowsOfA) {
    return decode_rows(at.peers(), operands, 0, gemm.m, gemm.k, a[0], a[1], rows);
  }
  if (kind == Kind::kKOfA) {
    return decode_rows(at.peers(), operands, 0, gemm.k, gemm.m, a[1], a[0], rows);
  }
  return decode_rows(at.peers(), operands, 1, gemm.k, gemm.n, b[0], b[1], rows);
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
  JAX_TCGEMM_RETURN_IF_ERROR(check_uncaptured(stream));
  const GemmAttributes& gemm = at.gemm;
  const auto algorithm = algorithm_from_name(gemm.algorithm);
  JAX_TCGEMM_REQUIRE(algorithm.has_value(), "unknown algorithm '", gemm.algorithm, "'");
  JAX_TCGEMM_REQUIRE(gemm.batch_shape.size() == 0, gemm.batch_shape.size(), " batch dimensions");
  Kind kind = Kind::kRowsOfA;
  JAX_TCGEMM_RETURN_IF_ERROR(decode_kind(at.kind, &kind));
  Peers peers;
  const int64_t signature = signature_of(gemm.m, gemm.n, gemm.k, static_cast<int>(kind));
  JAX_TCGEMM_RETURN_IF_ERROR(
      decode_peers(at.peers(), operands, signature, run, ordinal, stream, &peers));
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
  JAX_TCGEMM_RETURN_IF_ERROR(decode_gathered(at, kind, operands, &rows));
  GatheredProduct product;
  product.multiply = [&] { return run_gemm(problem, *device, stream); };
  if (kind == Kind::kRowsOfA) {
    product.multiply_part = [&](int rank, const void* a) {
      return run_gemm(part_of_rows(problem, rank, peers.count, a), *device, stream);
    };
  }
  return run_gathered(product, rows, peers, *device, stream);
}

ffi::Error overlapped(cudaStream_t stream, int32_t ordinal, ffi::RunId run,
                      ffi::RemainingArgs operands, ffi::RemainingRets results,
                      OverlappedAttributes attributes) {
  return as_error(decode_and_run(attributes, operands, results, run.run_id, ordinal, stream));
}

ffi::Error instantiate_overlapped(ffi::RemainingArgs, ffi::RemainingRets results,
                                  OverlappedAttributes attributes) {
  Kind kind = {};
  if (decode_kind(attributes.kind, &kind).ok() && kind == Kind::kRowsOfA &&
      attributes.group_size > 1) {
    GemmAttributes part = attributes.gemm;  // the first product of the rows runs in parts
    part.m /= attributes.group_size;
    static_cast<void>(begin_kernels(part, results));
  }
  static_cast<void>(begin_kernels(attributes.gemm, results));
  count_executable(attributes.call);
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

Target overlapped_target() {
  return {"jax_tcgemm_overlapped_v2", kOverlappedHandler, kInstantiateHandler};
}

}  // namespace jax_tcgemm
