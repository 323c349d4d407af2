#include "ffi/operands.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>

#include "ffi/buffers.h"
#include "ffi/element_types.h"
#include "ffi/factors.h"
#include "gemm_params.h"

namespace jax_tcgemm {
namespace {

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
