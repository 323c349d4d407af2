// Connects XLA to the rungs: one handler, with an attribute that selects the rung.

#include <cstdint>
#include <string>

#include "ladder.h"
#include "xla/ffi/api/ffi.h"

namespace ladder {
namespace {

namespace ffi = xla::ffi;

template <typename T>
cudaError_t climb(int rung, const Product<T>& p) {
  using Launch = cudaError_t (*)(const Product<T>&);
#define LADDER_LAUNCH(name) &name<T>,
  static constexpr Launch kRungs[] = {LADDER_RUNGS(LADDER_LAUNCH)};
#undef LADDER_LAUNCH
  const int count = sizeof(kRungs) / sizeof(kRungs[0]);
  return 0 <= rung && rung < count ? kRungs[rung](p) : cudaErrorInvalidValue;
}

template <typename T>
cudaError_t launch(cudaStream_t stream, int rung, const ffi::AnyBuffer& a, const ffi::AnyBuffer& b,
                   ffi::AnyBuffer& d) {
  return climb<T>(
      rung, {static_cast<const T*>(a.untyped_data()), static_cast<const T*>(b.untyped_data()),
             static_cast<T*>(d.untyped_data()), static_cast<int>(d.dimensions()[0]),
             static_cast<int>(d.dimensions()[1]), static_cast<int>(a.dimensions()[1]), stream});
}

ffi::Error multiply(cudaStream_t stream, int32_t rung, ffi::AnyBuffer a, ffi::AnyBuffer b,
                    ffi::Result<ffi::AnyBuffer> d) {
  for (const ffi::AnyBuffer& x : {a, b, *d}) {
    if (x.dimensions().size() != 2 || x.dimensions()[0] % kUnit || x.dimensions()[1] % kUnit) {
      return ffi::Error::InvalidArgument("a matrix whose extents are no multiples of 128");
    }
    if (x.element_type() != d->element_type()) {
      return ffi::Error::InvalidArgument("matrices of several types");
    }
  }
  cudaError_t error = cudaErrorInvalidValue;
  if (d->element_type() == ffi::DataType::F32) error = launch<float>(stream, rung, a, b, *d);
  if (d->element_type() == ffi::DataType::BF16) {
    error = launch<__nv_bfloat16>(stream, rung, a, b, *d);
  }
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal("rung " + std::to_string(rung) + ": " + cudaGetErrorString(error));
}

}  // namespace
}  // namespace ladder

XLA_FFI_DEFINE_HANDLER_SYMBOL(Ladder, ladder::multiply,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Attr<int32_t>("rung")
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>());
