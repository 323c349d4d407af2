#include "ffi/factors.h"

#include <array>
#include <cstdint>
#include <optional>

#include "common/saturating.h"
#include "ffi/element_types.h"
#include "gemm_params.h"

namespace jax_tcgemm {
namespace {

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

}  // namespace

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

}  // namespace jax_tcgemm
