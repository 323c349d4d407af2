// Checks the buffers of the custom call of a product against its attributes.

#ifndef JAX_TCGEMM_FFI_BUFFERS_H_
#define JAX_TCGEMM_FFI_BUFFERS_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "common/saturating.h"
#include "common/status.h"
#include "ffi/attributes.h"
#include "ffi/element_types.h"
#include "gemm_params.h"

namespace jax_tcgemm {

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

inline BatchStrides batch_strides(Strides strides, size_t batch_rank) {
  BatchStrides result = {};
  for (size_t i = 0; i < batch_rank; ++i) result.stride[i] = strides[i];
  return result;
}

inline bool is_multiple(int64_t value, int64_t divisor) { return value % divisor == 0; }

// Checks if the base, `ld` and the batch's strides are multiples of `alignment` bytes.
inline bool is_aligned(const void* base, int64_t ld, const BatchStrides& batch, int64_t bytes,
                       int64_t alignment) {
  bool aligned = is_multiple(reinterpret_cast<uintptr_t>(base), alignment) &&
                 is_multiple(ld * bytes, alignment);
  for (const int64_t stride : batch.stride) aligned &= is_multiple(stride * bytes, alignment);
  return aligned;
}

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_FFI_BUFFERS_H_
