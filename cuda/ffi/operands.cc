#include "ffi/operands.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>

#include "common/saturating.h"
#include "ffi/element_types.h"
#include "gemm_params.h"

namespace jax_tcgemm {
namespace {

// An operand of the custom call. Its strides are those of the batch, then those of the matrix.
struct Buffer {
  const char* name;
  ffi::AnyBuffer data;
  Strides strides;
};

// Sets `span` to the elements from the buffer's start to the end of the last addressed one, 0 if
// there are none, and checks that the buffer has them. `extents` are the matrix extents; they
// belong to the strides after those of the batch.
template <size_t kRank>
Status checked_span(const Buffer& buffer, const GemmAttributes& attributes,
                    const std::array<int64_t, kRank>& extents, int64_t* span) {
  const size_t batch_rank = attributes.batch_shape.size();
  JAX_TCGEMM_REQUIRE(buffer.strides.size() == batch_rank + kRank, buffer.name, " has ",
                     buffer.strides.size(), " strides for ", batch_rank, " batch and ", kRank,
                     " matrix dimensions");
  AddressedSpan addressed;
  for (size_t i = 0; i < batch_rank + kRank; ++i) {
    const int64_t extent = i < batch_rank ? attributes.batch_shape[i] : extents[i - batch_rank];
    JAX_TCGEMM_REQUIRE(is_stride(buffer.strides[i]), buffer.name, " stride ", i, " is ",
                       buffer.strides[i]);
    addressed.add_dimension(extent, buffer.strides[i]);
  }
  *span = addressed.elements();
  const int64_t available = real_count(buffer.data);
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

// Checks if the base, `ld` and the batch's strides are multiples of `alignment` bytes.
bool is_aligned(const void* base, int64_t ld, const BatchStrides& batch, int64_t bytes,
                int64_t alignment) {
  bool aligned = is_multiple(reinterpret_cast<uintptr_t>(base), alignment) &&
                 is_multiple(ld * bytes, alignment);
  for (const int64_t stride : batch.stride) aligned &= is_multiple(stride * bytes, alignment);
  return aligned;
}

// Reads the layout of A or B: the contiguous dimension, and the alignment for TMA and cp.async.
Status decode_operand(const char* name, const void* data, int64_t bytes, Strides strides,
                      const GemmAttributes& attributes, int64_t extent_mn, int64_t stride_mn,
                      int64_t stride_k, int64_t span, Operand* operand, Major* major,
                      bool* strides_aligned, bool* aligned) {
  const int64_t extent_k = attributes.k;
  const bool mn_major = stride_mn == 1 && (stride_k != 1 || extent_k <= 1);
  const bool k_major = !mn_major && (stride_k == 1 || extent_k <= 1);
  JAX_TCGEMM_REQUIRE(mn_major || k_major || extent_mn <= 1, name, " has strides ", stride_mn,
                     " and ", stride_k, " for extents ", extent_mn, " and k=", extent_k,
                     "; one of them must be 1");
  *major = k_major ? Major::kK : Major::kMn;
  // A single row's stride is never used, so it must not make the operand unaligned.
  const bool single_row = (k_major ? extent_mn : extent_k) <= 1;
  operand->data = data;
  operand->ld = single_row ? 0 : k_major ? stride_mn : stride_k;
  // Kernels would load rows with stride 0 as if they lay one after the other.
  JAX_TCGEMM_REQUIRE(span == 0 || single_row || operand->ld > 0, name, " has strides ", stride_mn,
                     " and ", stride_k, " for extents ", extent_mn, " and k=", extent_k,
                     "; none of them may be 0");
  operand->span = span;
  operand->batch = batch_strides(strides, attributes.batch_shape.size());
  *strides_aligned = is_aligned(operand->data, operand->ld, operand->batch, bytes, 16);
  *aligned = *strides_aligned && is_multiple((k_major ? extent_k : extent_mn) * bytes, 16);
  return Status();
}

// The dimensions of D that an addend has, in addition to those of the batch.
enum class Extent { kMatrix, kAlongM, kAlongN };

// Reads C, a bias or a scale.
Status decode_addend(const Buffer& buffer, const GemmAttributes& attributes, Extent extent,
                     ElementType d_type, Addend* addend) {
  int64_t span = 0;
  if (extent == Extent::kMatrix) {
    JAX_TCGEMM_RETURN_IF_ERROR(
        checked_span<2>(buffer, attributes, {attributes.m, attributes.n}, &span));
  } else {
    const int64_t length = extent == Extent::kAlongM ? attributes.m : attributes.n;
    JAX_TCGEMM_RETURN_IF_ERROR(checked_span<1>(buffer, attributes, {length}, &span));
  }
  ElementType& type = addend->type;
  JAX_TCGEMM_RETURN_IF_ERROR(decode_type(buffer.name, buffer.data.element_type(), &type));
  JAX_TCGEMM_REQUIRE(type == d_type || type == ElementType::kF32, buffer.name, " has element type ",
                     static_cast<int>(type), ", D has ", static_cast<int>(d_type));
  const size_t batch_rank = attributes.batch_shape.size();
  const int64_t last = buffer.strides[buffer.strides.size() - 1];
  addend->data = buffer.data.untyped_data();
  addend->stride_m = extent == Extent::kAlongN ? 0 : buffer.strides[batch_rank];
  addend->stride_n = extent == Extent::kAlongM ? 0 : last;
  addend->batch = batch_strides(buffer.strides, batch_rank);
  addend->vectorizable = addend->stride_n == 1 &&
                         is_aligned(addend->data, addend->stride_m, addend->batch,
                                    element_bytes(type), kVectorColumns * element_bytes(type));
  return Status();
}

Status check_types(const GemmProblem& problem, const Buffer& a, const Buffer& b) {
  const Arithmetic arithmetic = arithmetic_of(problem.algorithm);
  ElementType type_a, type_b;
  JAX_TCGEMM_RETURN_IF_ERROR(decode_real_type("A", a.data.element_type(), &type_a));
  JAX_TCGEMM_RETURN_IF_ERROR(decode_real_type("B", b.data.element_type(), &type_b));
  const ElementType a_type = problem.planes == nullptr ? arithmetic.a : ElementType::kF32;
  const ElementType b_type = problem.planes == nullptr ? arithmetic.b : ElementType::kF32;
  JAX_TCGEMM_REQUIRE(type_a == a_type && type_b == b_type, "element types of A and B are ",
                     static_cast<int>(type_a), " and ", static_cast<int>(type_b), ", ",
                     problem.planes == nullptr ? arithmetic.name : problem.planes->name, " takes ",
                     static_cast<int>(a_type), " and ", static_cast<int>(b_type));
  const ElementType d = problem.params.epilogue.d_type;
  JAX_TCGEMM_REQUIRE(
      is_output(d, problem.algorithm) && (problem.planes == nullptr || d == ElementType::kF32),
      "element type of D is ", static_cast<int>(d));
  return Status();
}

// Reads the operands of a call one after the other.
class OperandReader {
 public:
  OperandReader(const Call& call, ElementType d_type) : call_(call), d_type_(d_type) {}

  Status next(const char* name, Strides strides, std::optional<Buffer>* buffer) {
    auto data = call_.operands.get<ffi::AnyBuffer>(index_);
    JAX_TCGEMM_REQUIRE(data.has_value(), "operand ", index_, " (", name, ") is missing");
    *buffer = Buffer{name, *data, strides};
    ++index_;
    return Status();
  }

  Status addend(bool present, const char* name, Strides strides, Extent extent, Addend* addend) {
    if (!present) return Status();
    std::optional<Buffer> buffer;
    JAX_TCGEMM_RETURN_IF_ERROR(next(name, strides, &buffer));
    return decode_addend(*buffer, call_.attributes, extent, d_type_, addend);
  }

  // Reads a factor of rows or columns. Kernels read it as float32, whatever type D has.
  Status scale(bool present, const char* name, Strides strides, Extent extent, Addend* scale) {
    JAX_TCGEMM_RETURN_IF_ERROR(addend(present, name, strides, extent, scale));
    JAX_TCGEMM_REQUIRE(!present || scale->type == ElementType::kF32, name, " has element type ",
                       static_cast<int>(d_type_), ", not float32");
    return Status();
  }

  Status scalar(bool present, const char* name, Strides strides, Scalar* scalar) {
    if (!present) return Status();
    std::optional<Buffer> buffer;
    JAX_TCGEMM_RETURN_IF_ERROR(next(name, strides, &buffer));
    int64_t span = 0;
    JAX_TCGEMM_RETURN_IF_ERROR(
        checked_span<0>(*buffer, call_.attributes, std::array<int64_t, 0>{}, &span));
    JAX_TCGEMM_REQUIRE(buffer->data.element_type() == ffi::F32, name, " has element type ",
                       static_cast<int>(buffer->data.element_type()));
    scalar->data = static_cast<const float*>(buffer->data.untyped_data());
    scalar->batch = batch_strides(strides, call_.attributes.batch_shape.size());
    return Status();
  }

 private:
  const Call& call_;
  ElementType d_type_;
  size_t index_ = 0;
};

// Reads the layouts of A and B at these addresses. The spans count the addressed elements.
Status decode_factor_layouts(const GemmAttributes& at, const void* a, const void* b, int64_t bytes,
                             int64_t span_a, int64_t span_b, GemmProblem* problem) {
  const size_t batch_rank = at.batch_shape.size();
  JAX_TCGEMM_RETURN_IF_ERROR(decode_operand("a", a, bytes, at.a_strides, at, at.m,
                                            at.a_strides[batch_rank], at.a_strides[batch_rank + 1],
                                            span_a, &problem->params.a, &problem->major_a,
                                            &problem->strides_aligned_a, &problem->aligned_a));
  return decode_operand("b", b, bytes, at.b_strides, at, at.n, at.b_strides[batch_rank + 1],
                        at.b_strides[batch_rank], span_b, &problem->params.b, &problem->major_b,
                        &problem->strides_aligned_b, &problem->aligned_b);
}

Status decode_factors(const GemmAttributes& at, const Buffer& a, const Buffer& b,
                      GemmProblem* problem) {
  int64_t span_a = 0, span_b = 0;
  JAX_TCGEMM_RETURN_IF_ERROR(checked_span<2>(a, at, {at.m, at.k}, &span_a));
  std::array<int64_t, 2> extents_b = {at.k, at.n};
  if (at.pairs_of_b) {
    JAX_TCGEMM_REQUIRE(b.data.element_type() == ffi::C64 && at.k % 2 == 0 && at.n % 2 == 0,
                       "pairs of element type ", static_cast<int>(b.data.element_type()),
                       " for k=", at.k, " n=", at.n);
    JAX_TCGEMM_REQUIRE(at.b_strides.size() > 0, "pairs without strides");
    // The buffer has half the extent along the dimension that is not contiguous; the contiguous one
    // counts real and imaginary parts.
    extents_b[at.b_strides[at.b_strides.size() - 1] == 1 ? 0 : 1] /= 2;
  }
  problem->params.pairs_of_b = at.pairs_of_b;
  JAX_TCGEMM_RETURN_IF_ERROR(checked_span<2>(b, at, extents_b, &span_b));
  return decode_factor_layouts(at, a.data.untyped_data(), b.data.untyped_data(),
                               real_bytes(a.data.element_type()), span_a, span_b, problem);
}

// Reads the second weight of a gated product: a buffer of its own, or a part of b's.
Status decode_second_weight(const GemmAttributes& at, const Buffer& b,
                            const std::optional<Buffer>& b2, GemmProblem* problem) {
  const int64_t bytes = real_bytes(b.data.element_type());
  int64_t span = 0;
  if (b2.has_value()) {
    JAX_TCGEMM_REQUIRE(b2->data.element_type() == b.data.element_type(),
                       "the two weights differ in element type");
    JAX_TCGEMM_RETURN_IF_ERROR(checked_span<2>(*b2, at, {at.k, at.n}, &span));
    problem->params.b2 = b2->data.untyped_data();
  } else {
    JAX_TCGEMM_RETURN_IF_ERROR(checked_span<2>(b, at, {at.k, at.n}, &span));
    const int64_t available = real_count(b.data);
    JAX_TCGEMM_REQUIRE(0 <= at.b2_offset && add_sat(at.b2_offset, span) <= available,
                       "the second weight begins at element ", at.b2_offset, " of ", available);
    problem->params.b2 = static_cast<const char*>(b.data.untyped_data()) + at.b2_offset * bytes;
  }
  const bool aligned = is_multiple(reinterpret_cast<uintptr_t>(problem->params.b2), 16);
  problem->strides_aligned_b &= aligned;
  problem->aligned_b &= aligned;
  return Status();
}

Status check_combination(const GemmAttributes& at) {
  const bool gated_derivative = at.c_role == "gated_derivative";
  JAX_TCGEMM_REQUIRE(at.has_c || at.c_role == "add" || at.c_role == "residual", "c_role is ",
                     at.c_role, " without c");
  JAX_TCGEMM_REQUIRE(at.has_c2 == gated_derivative && (!gated_derivative || at.has_aux), "c_role ",
                     at.c_role, " with has_c2=", at.has_c2, " has_aux=", at.has_aux);
  JAX_TCGEMM_REQUIRE(!at.gated || !(at.has_c || at.has_alpha || at.alpha != 1.f ||
                                    at.has_row_scale || at.has_column_scale),
                     "a gated product with c, alpha or scales");
  JAX_TCGEMM_REQUIRE(at.gated || !(at.has_b2 || at.has_bias2), "b2 without gating");
  return Status();
}

}  // namespace

Status decode_layouts(const GemmAttributes& attributes, GemmProblem* problem) {
  const size_t count = attributes.batch_shape.size() + 2;
  JAX_TCGEMM_REQUIRE(attributes.a_strides.size() == count && attributes.b_strides.size() == count,
                     attributes.a_strides.size(), " and ", attributes.b_strides.size(),
                     " strides of A and B, not ", count);
  for (const Strides strides : {attributes.a_strides, attributes.b_strides}) {
    for (const int64_t stride : strides) JAX_TCGEMM_REQUIRE(is_stride(stride), "stride ", stride);
  }
  return decode_factor_layouts(attributes, nullptr, nullptr, element_bytes(problem->algorithm), 1,
                               1, problem);
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

Status decode_role(std::string_view name, RoleOfC* role) {
  if (name == "add") {
    *role = RoleOfC::kAdd;
  } else if (name == "residual") {
    *role = RoleOfC::kResidual;
  } else if (name == "factor") {
    *role = RoleOfC::kFactor;
  } else if (name == "derivative") {
    *role = RoleOfC::kDerivative;
  } else {
    JAX_TCGEMM_REQUIRE(name == "gated_derivative", "unknown role of c '", name, "'");
    *role = RoleOfC::kGatedDerivative;
  }
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

Status decode_operands(const Call& call, GemmProblem* problem) {
  const GemmAttributes& at = call.attributes;
  EpilogueParams& e = problem->params.epilogue;
  OperandReader reader(call, e.d_type);
  std::optional<Buffer> a, b, b2;
  JAX_TCGEMM_RETURN_IF_ERROR(check_combination(at));
  JAX_TCGEMM_RETURN_IF_ERROR(decode_role(at.c_role, &e.role_of_c));
  JAX_TCGEMM_RETURN_IF_ERROR(reader.next("a", at.a_strides, &a));
  JAX_TCGEMM_RETURN_IF_ERROR(reader.next("b", at.b_strides, &b));
  JAX_TCGEMM_RETURN_IF_ERROR(check_types(*problem, *a, *b));
  JAX_TCGEMM_RETURN_IF_ERROR(decode_factors(at, *a, *b, problem));
  e.gated = at.gated;
  e.alpha.value = at.alpha;
  e.beta.value = at.beta;
  JAX_TCGEMM_RETURN_IF_ERROR(reader.addend(at.has_c, "c", at.c_strides, Extent::kMatrix, &e.c));
  JAX_TCGEMM_RETURN_IF_ERROR(
      reader.addend(at.has_bias, "bias", at.bias_strides, Extent::kAlongN, &e.bias));
  JAX_TCGEMM_RETURN_IF_ERROR(reader.scalar(at.has_alpha, "alpha", at.alpha_strides, &e.alpha));
  JAX_TCGEMM_RETURN_IF_ERROR(reader.scalar(at.has_beta, "beta", at.beta_strides, &e.beta));
  JAX_TCGEMM_RETURN_IF_ERROR(reader.scale(at.has_row_scale, "row_scale", at.row_scale_strides,
                                          Extent::kAlongM, &e.row_scale));
  JAX_TCGEMM_RETURN_IF_ERROR(reader.scale(at.has_column_scale, "column_scale",
                                          at.column_scale_strides, Extent::kAlongN,
                                          &e.column_scale));
  if (at.has_b2) JAX_TCGEMM_RETURN_IF_ERROR(reader.next("b2", at.b_strides, &b2));
  JAX_TCGEMM_RETURN_IF_ERROR(
      reader.addend(at.has_bias2, "bias2", at.bias2_strides, Extent::kAlongN, &e.bias2));
  JAX_TCGEMM_RETURN_IF_ERROR(reader.addend(at.has_c2, "c2", at.c_strides, Extent::kMatrix, &e.c2));
  JAX_TCGEMM_REQUIRE(!at.has_c2 || e.c2.type == e.c.type, "c and c2 differ in element type");
  return at.gated ? decode_second_weight(at, *b, b2, problem) : Status();
}

ffi::Error as_error(const Status& status) {
  if (status.ok()) return ffi::Error::Success();
  return status.code() == Status::Code::kInvalidArgument
             ? ffi::Error::InvalidArgument(status.message())
             : ffi::Error::Internal(status.message());
}

}  // namespace jax_tcgemm
