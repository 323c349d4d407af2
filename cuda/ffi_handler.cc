// The way from XLA to the kernels: decodes a custom call into a GemmProblem, checks every extent
// and stride against the buffers, and turns a Status into an ffi::Error.

#include "ffi_handler.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <string_view>

#include "algorithm_names.h"
#include "device.h"
#include "dispatch.h"
#include "gemm_params.h"
#include "status.h"
#include "xla/ffi/api/ffi.h"

namespace jax_tcgemm {

namespace ffi = ::xla::ffi;
using Strides = ffi::Span<const int64_t>;

// The attributes of the custom call, set by jax_tcgemm/primitive.py. Strides are in elements.
struct GemmAttributes {
  int64_t m, n, k;
  int64_t padding_bytes;  // of the workspace, for padded copies of unaligned operands
  Strides batch_shape;
  Strides a_strides;      // (batch..., m, k)
  Strides b_strides;      // (batch..., k, n)
  Strides c_strides;      // (batch..., m, n)
  Strides bias_strides;   // (batch..., n)
  Strides alpha_strides;  // (batch...)
  Strides beta_strides;   // (batch...)
  bool has_c, has_bias, has_alpha, has_beta, has_aux, has_workspace;
  float alpha, beta;
  std::string_view activation, algorithm, config;
};

}  // namespace jax_tcgemm

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    ::jax_tcgemm::GemmAttributes, ::xla::ffi::StructMember<int64_t>("m"),
    ::xla::ffi::StructMember<int64_t>("n"), ::xla::ffi::StructMember<int64_t>("k"),
    ::xla::ffi::StructMember<int64_t>("padding_bytes"),
    ::xla::ffi::StructMember<::jax_tcgemm::Strides>("batch_shape"),
    ::xla::ffi::StructMember<::jax_tcgemm::Strides>("a_strides"),
    ::xla::ffi::StructMember<::jax_tcgemm::Strides>("b_strides"),
    ::xla::ffi::StructMember<::jax_tcgemm::Strides>("c_strides"),
    ::xla::ffi::StructMember<::jax_tcgemm::Strides>("bias_strides"),
    ::xla::ffi::StructMember<::jax_tcgemm::Strides>("alpha_strides"),
    ::xla::ffi::StructMember<::jax_tcgemm::Strides>("beta_strides"),
    ::xla::ffi::StructMember<bool>("has_c"), ::xla::ffi::StructMember<bool>("has_bias"),
    ::xla::ffi::StructMember<bool>("has_alpha"), ::xla::ffi::StructMember<bool>("has_beta"),
    ::xla::ffi::StructMember<bool>("has_aux"), ::xla::ffi::StructMember<bool>("has_workspace"),
    ::xla::ffi::StructMember<float>("alpha"), ::xla::ffi::StructMember<float>("beta"),
    ::xla::ffi::StructMember<std::string_view>("activation"),
    ::xla::ffi::StructMember<std::string_view>("algorithm"),
    ::xla::ffi::StructMember<std::string_view>("config"));

namespace jax_tcgemm {
namespace {

constexpr int64_t kMaxExtent = std::numeric_limits<int32_t>::max();

// One operand as the handler sees it: the strides of the batch, then those of the matrix.
struct Buffer {
  const char* name;
  ffi::AnyBuffer data;
  Strides strides;
};

struct Call {
  const GemmAttributes& attributes;
  ffi::RemainingArgs& operands;
  ffi::RemainingRets& results;
};

int64_t element_bytes(ffi::DataType type) { return static_cast<int64_t>(ffi::ByteWidth(type)); }

// Elements from the buffer's start to the end of the last one addressed; 0 when there are none.
// `extents` are the matrix extents that belong to the strides after those of the batch.
template <size_t kRank>
Status checked_span(const Buffer& buffer, const GemmAttributes& attributes,
                    const std::array<int64_t, kRank>& extents, int64_t* span) {
  const size_t batch_rank = attributes.batch_shape.size();
  JAX_TCGEMM_REQUIRE(buffer.strides.size() == batch_rank + kRank, buffer.name, " has ",
                     buffer.strides.size(), " strides for ", batch_rank, " batch and ", kRank,
                     " matrix dimensions");
  int64_t last = 0;
  bool empty = false;
  for (size_t i = 0; i < batch_rank + kRank; ++i) {
    const int64_t extent = i < batch_rank ? attributes.batch_shape[i] : extents[i - batch_rank];
    JAX_TCGEMM_REQUIRE(buffer.strides[i] >= 0, buffer.name, " stride ", i, " is ",
                       buffer.strides[i]);
    empty |= extent == 0;
    last += (extent - 1) * buffer.strides[i];
  }
  *span = empty ? 0 : last + 1;
  const int64_t available = static_cast<int64_t>(buffer.data.element_count());
  JAX_TCGEMM_REQUIRE(*span <= available, buffer.name, " is addressed up to element ", *span,
                     " but has ", available);
  return Status();
}

BatchStrides batch_strides(Strides strides, size_t batch_rank) {
  BatchStrides result = {};
  for (size_t i = 0; i < batch_rank; ++i) result.stride[i] = strides[i];
  return result;
}

bool is_multiple(int64_t value, int64_t divisor) { return value % divisor == 0; }

// Whether the base and every step of `ld` and of the batch keep to multiples of `alignment` bytes.
bool is_aligned(const void* base, int64_t ld, const BatchStrides& batch, int64_t bytes,
                int64_t alignment) {
  bool aligned = is_multiple(reinterpret_cast<uintptr_t>(base), alignment) &&
                 is_multiple(ld * bytes, alignment);
  for (const int64_t stride : batch.stride) aligned &= is_multiple(stride * bytes, alignment);
  return aligned;
}

// A or B: which dimension is contiguous, and whether cp.async can address it.
Status decode_operand(const Buffer& buffer, const GemmAttributes& attributes, int64_t extent_mn,
                      int64_t stride_mn, int64_t stride_k, int64_t span, Operand* operand,
                      Major* major, bool* strides_aligned, bool* aligned) {
  const int64_t extent_k = attributes.k;
  const bool mn_major = stride_mn == 1 && (stride_k != 1 || extent_k <= 1);
  const bool k_major = !mn_major && (stride_k == 1 || extent_k <= 1);
  JAX_TCGEMM_REQUIRE(mn_major || k_major || extent_mn <= 1, buffer.name, " has strides ", stride_mn,
                     " and ", stride_k, " for extents ", extent_mn, " and k=", extent_k,
                     "; one of them must be 1");
  *major = k_major ? Major::kK : Major::kMn;
  // The leading dimension of a single row is never used; it must not count as unaligned.
  const bool single_row = (k_major ? extent_mn : extent_k) <= 1;
  operand->data = buffer.data.untyped_data();
  operand->ld = single_row ? 0 : k_major ? stride_mn : stride_k;
  operand->span = span;
  operand->batch = batch_strides(buffer.strides, attributes.batch_shape.size());
  const int64_t bytes = element_bytes(buffer.data.element_type());
  *strides_aligned = is_aligned(operand->data, operand->ld, operand->batch, bytes, 16);
  *aligned = *strides_aligned && is_multiple((k_major ? extent_k : extent_mn) * bytes, 16);
  return Status();
}

// C or bias. `rank` strides follow the batch: (m, n) or (n).
Status decode_addend(const Buffer& buffer, const GemmAttributes& attributes, ffi::DataType d_type,
                     Addend* addend) {
  const ffi::DataType type = buffer.data.element_type();
  JAX_TCGEMM_REQUIRE(type == d_type || type == ffi::F32, buffer.name, " has element type ",
                     static_cast<int>(type), ", D has ", static_cast<int>(d_type));
  const size_t batch_rank = attributes.batch_shape.size();
  const size_t rank = buffer.strides.size() - batch_rank;
  addend->data = buffer.data.untyped_data();
  addend->stride_m = rank == 2 ? buffer.strides[batch_rank] : 0;
  addend->stride_n = buffer.strides[batch_rank + rank - 1];
  addend->batch = batch_strides(buffer.strides, batch_rank);
  addend->is_float32 = type == ffi::F32;
  addend->vectorizable = addend->stride_n == 1 &&
                         is_aligned(addend->data, addend->stride_m, addend->batch,
                                    element_bytes(type), kVectorColumns * element_bytes(type));
  return Status();
}

Status decode_activation(std::string_view name, Activation* activation) {
  if (name.empty()) {
    *activation = Activation::kNone;
    return Status();
  }
#define JAX_TCGEMM_MATCH(Name)         \
  if (name == #Name) {                 \
    *activation = Activation::k##Name; \
    return Status();                   \
  }
  JAX_TCGEMM_ACTIVATIONS(JAX_TCGEMM_MATCH)
#undef JAX_TCGEMM_MATCH
  JAX_TCGEMM_REQUIRE(false, "unknown activation '", name, "'");
}

Status decode_shape(const GemmAttributes& attributes, GemmParams* params) {
  for (const int64_t extent : {attributes.m, attributes.n, attributes.k}) {
    JAX_TCGEMM_REQUIRE(0 <= extent && extent <= kMaxExtent, "m=", attributes.m, " n=", attributes.n,
                       " k=", attributes.k);
  }
  JAX_TCGEMM_REQUIRE(attributes.batch_shape.size() <= size_t{kMaxBatchRank},
                     attributes.batch_shape.size(), " batch dimensions, at most ", kMaxBatchRank);
  params->m = static_cast<int32_t>(attributes.m);
  params->n = static_cast<int32_t>(attributes.n);
  params->k = static_cast<int32_t>(attributes.k);
  params->batch_rank = static_cast<int32_t>(attributes.batch_shape.size());
  int64_t batch = 1;
  for (int i = 0; i < params->batch_rank; ++i) {
    const int64_t extent = attributes.batch_shape[i];
    JAX_TCGEMM_REQUIRE(0 <= extent && extent <= kMaxExtent, "batch extent ", i, " is ", extent);
    params->batch_shape[i] = static_cast<int32_t>(extent);
    batch = extent == 0 ? 0 : std::min(batch * extent, kMaxExtent + 1);
  }
  JAX_TCGEMM_REQUIRE(batch <= kMaxExtent, "more than ", kMaxExtent, " matrices in the batch");
  params->batch = static_cast<int32_t>(batch);
  return Status();
}

Status check_types(Algorithm algorithm, ffi::DataType a, ffi::DataType b, ffi::DataType d) {
  const ffi::DataType input = algorithm == Algorithm::kBf16Bf16F32   ? ffi::BF16
                              : algorithm == Algorithm::kTf32Tf32F32 ? ffi::F32
                                                                     : ffi::F16;
  JAX_TCGEMM_REQUIRE(a == input && b == input, "element types of A and B are ", static_cast<int>(a),
                     " and ", static_cast<int>(b), ", the algorithm takes ",
                     static_cast<int>(input));
  JAX_TCGEMM_REQUIRE(d == input || d == ffi::F32, "element type of D is ", static_cast<int>(d));
  return Status();
}

// The i-th operand of the call.
Status get_operand(const Call& call, size_t index, const char* name, Strides strides,
                   std::optional<Buffer>* buffer) {
  auto data = call.operands.get<ffi::AnyBuffer>(index);
  JAX_TCGEMM_REQUIRE(data.has_value(), "operand ", index, " (", name, ") is missing");
  *buffer = Buffer{name, *data, strides};
  return Status();
}

Status decode_scalar(const Call& call, size_t index, const char* name, Strides strides,
                     Scalar* scalar) {
  std::optional<Buffer> buffer;
  JAX_TCGEMM_RETURN_IF_ERROR(get_operand(call, index, name, strides, &buffer));
  int64_t span = 0;
  JAX_TCGEMM_RETURN_IF_ERROR(
      checked_span<0>(*buffer, call.attributes, std::array<int64_t, 0>{}, &span));
  JAX_TCGEMM_REQUIRE(buffer->data.element_type() == ffi::F32, name, " has element type ",
                     static_cast<int>(buffer->data.element_type()));
  scalar->data = static_cast<const float*>(buffer->data.untyped_data());
  scalar->batch = batch_strides(strides, call.attributes.batch_shape.size());
  return Status();
}

Status decode_inputs(const Call& call, Algorithm algorithm, ffi::DataType d_type,
                     GemmProblem* problem) {
  const GemmAttributes& at = call.attributes;
  const size_t batch_rank = at.batch_shape.size();
  std::optional<Buffer> a, b, addend;
  int64_t span = 0;
  JAX_TCGEMM_RETURN_IF_ERROR(get_operand(call, 0, "a", at.a_strides, &a));
  JAX_TCGEMM_RETURN_IF_ERROR(get_operand(call, 1, "b", at.b_strides, &b));
  JAX_TCGEMM_RETURN_IF_ERROR(
      check_types(algorithm, a->data.element_type(), b->data.element_type(), d_type));
  problem->aligned_a = problem->aligned_b = true;
  JAX_TCGEMM_RETURN_IF_ERROR(checked_span<2>(*a, at, {at.m, at.k}, &span));
  JAX_TCGEMM_RETURN_IF_ERROR(decode_operand(
      *a, at, at.m, at.a_strides[batch_rank], at.a_strides[batch_rank + 1], span,
      &problem->params.a, &problem->major_a, &problem->strides_aligned_a, &problem->aligned_a));
  JAX_TCGEMM_RETURN_IF_ERROR(checked_span<2>(*b, at, {at.k, at.n}, &span));
  JAX_TCGEMM_RETURN_IF_ERROR(decode_operand(
      *b, at, at.n, at.b_strides[batch_rank + 1], at.b_strides[batch_rank], span,
      &problem->params.b, &problem->major_b, &problem->strides_aligned_b, &problem->aligned_b));

  EpilogueParams& epilogue = problem->params.epilogue;
  epilogue.alpha.value = at.alpha;
  epilogue.beta.value = at.beta;
  size_t next = 2;
  if (at.has_c) {
    JAX_TCGEMM_RETURN_IF_ERROR(get_operand(call, next++, "c", at.c_strides, &addend));
    JAX_TCGEMM_RETURN_IF_ERROR(checked_span<2>(*addend, at, {at.m, at.n}, &span));
    JAX_TCGEMM_RETURN_IF_ERROR(decode_addend(*addend, at, d_type, &epilogue.c));
  }
  if (at.has_bias) {
    JAX_TCGEMM_RETURN_IF_ERROR(get_operand(call, next++, "bias", at.bias_strides, &addend));
    JAX_TCGEMM_RETURN_IF_ERROR(checked_span<1>(*addend, at, {at.n}, &span));
    JAX_TCGEMM_RETURN_IF_ERROR(decode_addend(*addend, at, d_type, &epilogue.bias));
  }
  if (at.has_alpha) {
    JAX_TCGEMM_RETURN_IF_ERROR(
        decode_scalar(call, next++, "alpha", at.alpha_strides, &epilogue.alpha));
  }
  if (at.has_beta) {
    JAX_TCGEMM_RETURN_IF_ERROR(
        decode_scalar(call, next++, "beta", at.beta_strides, &epilogue.beta));
  }
  return Status();
}

// D, the pre-activation, and the workspace.
Status decode_results(const Call& call, GemmProblem* problem, ffi::DataType* d_type) {
  const GemmAttributes& at = call.attributes;
  GemmParams* params = &problem->params;
  const int64_t elements = int64_t{params->batch} * params->m * params->n;
  const size_t matrices = at.has_aux ? 2 : 1;
  const size_t count = matrices + (at.has_workspace ? 1 : 0);
  JAX_TCGEMM_REQUIRE(call.results.size() == count, call.results.size(), " results, ", count,
                     " expected");
  if (at.has_workspace) {
    auto workspace = call.results.get<ffi::AnyBuffer>(matrices);
    JAX_TCGEMM_REQUIRE(workspace.has_value(), "the workspace is missing");
    problem->workspace = (*workspace)->untyped_data();
    problem->workspace_bytes = static_cast<int64_t>((*workspace)->size_bytes());
    JAX_TCGEMM_REQUIRE(0 <= at.padding_bytes && at.padding_bytes <= problem->workspace_bytes,
                       at.padding_bytes, " bytes of padding in a workspace of ",
                       problem->workspace_bytes);
    problem->padding_bytes = at.padding_bytes;
  }
  for (size_t i = 0; i < matrices; ++i) {
    auto result = call.results.get<ffi::AnyBuffer>(i);
    JAX_TCGEMM_REQUIRE(result.has_value(), "result ", i, " is missing");
    ffi::AnyBuffer buffer = **result;
    JAX_TCGEMM_REQUIRE(static_cast<int64_t>(buffer.element_count()) == elements, "result ", i,
                       " has ", buffer.element_count(), " elements, the problem ", elements);
    if (i == 0) *d_type = buffer.element_type();
    JAX_TCGEMM_REQUIRE(buffer.element_type() == *d_type, "D and aux differ in element type");
    (i == 0 ? params->epilogue.d : params->epilogue.aux) = buffer.untyped_data();
  }
  EpilogueParams& epilogue = params->epilogue;
  const int64_t vector_bytes = kVectorColumns * element_bytes(*d_type);
  epilogue.d_is_float32 = *d_type == ffi::F32;
  epilogue.d_vectorizable = is_multiple(params->n, kVectorColumns) &&
                            is_multiple(reinterpret_cast<uintptr_t>(epilogue.d), vector_bytes) &&
                            is_multiple(reinterpret_cast<uintptr_t>(epilogue.aux), vector_bytes);
  return Status();
}

Status decode_and_run(const Call& call, int32_t ordinal, cudaStream_t stream) {
  const GemmAttributes& at = call.attributes;
  GemmProblem problem = {};
  const auto algorithm = algorithm_from_name(at.algorithm);
  JAX_TCGEMM_REQUIRE(algorithm.has_value(), "unknown algorithm '", at.algorithm, "'");
  problem.algorithm = *algorithm;
  problem.config = at.config;
  ffi::DataType d_type = ffi::DataType::INVALID;
  JAX_TCGEMM_RETURN_IF_ERROR(decode_shape(at, &problem.params));
  JAX_TCGEMM_RETURN_IF_ERROR(decode_results(call, &problem, &d_type));
  JAX_TCGEMM_RETURN_IF_ERROR(decode_activation(at.activation, &problem.params.epilogue.activation));
  JAX_TCGEMM_RETURN_IF_ERROR(decode_inputs(call, *algorithm, d_type, &problem));
  if (problem.params.batch == 0 || problem.params.m == 0 || problem.params.n == 0) return Status();
  const DeviceProperties* device = nullptr;
  JAX_TCGEMM_RETURN_IF_ERROR(get_device_properties(ordinal, &device));
  return run_gemm(problem, *device, stream);
}

ffi::Error gemm(cudaStream_t stream, int32_t ordinal, ffi::RemainingArgs operands,
                ffi::RemainingRets results, GemmAttributes attributes) {
  const Status status = decode_and_run({attributes, operands, results}, ordinal, stream);
  if (status.ok()) return ffi::Error::Success();
  return status.code() == Status::Code::kInvalidArgument
             ? ffi::Error::InvalidArgument(status.message())
             : ffi::Error::Internal(status.message());
}

// Capturable into a CUDA graph: the handler only enqueues kernels.
XLA_FFI_DEFINE_HANDLER(kGemmHandler, gemm,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs<GemmAttributes>(),
                       {ffi::Traits::kCmdBufferCompatible});

#define JAX_TCGEMM_STRING(x) #x
#define JAX_TCGEMM_VALUE(x) JAX_TCGEMM_STRING(x)

}  // namespace

void* gemm_handler() { return reinterpret_cast<void*>(+kGemmHandler); }

const char* xla_ffi_api_version() {
  return JAX_TCGEMM_VALUE(XLA_FFI_API_MAJOR) "." JAX_TCGEMM_VALUE(XLA_FFI_API_MINOR);
}

}  // namespace jax_tcgemm
