// The activation functors: float32 in, float32 out. Their names are the C++ names in
// jax_tcgemm/epilogues.py, whose jnp functions are what they are tested against.
//
// All are accurate to a few float32 roundings: exp and the quotient by the fast instructions
// (2 ulp), nothing by tanh.approx, whose 2^-11 would show in float32 results.

#pragma once

#include <concepts>

#include "gemm_params.h"

namespace jax_tcgemm {

template <typename T>
concept ActivationFunctor = requires(float x) {
  { T::apply(x) } -> std::same_as<float>;
};

__device__ __forceinline__ float logistic(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }

struct Relu {
  // Written so that NaN passes, as in jnp.maximum(x, 0).
  static __device__ __forceinline__ float apply(float x) { return x < 0.f ? 0.f : x; }
};

struct Gelu {
  // 0.5 x (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3), which is x / (1 + exp(-2 u)):
  // no cancellation where tanh is near -1.
  static __device__ __forceinline__ float apply(float x) {
    constexpr float kScale = 1.5957691216057308f;  // 2 sqrt(2 / pi)
    const float twice_u = x * fmaf(kScale * 0.044715f * x, x, kScale);
    return __fdividef(x, 1.f + __expf(-twice_u));
  }
};

struct GeluExact {
  static __device__ __forceinline__ float apply(float x) {
    return 0.5f * x * erfcf(-0.7071067811865476f * x);
  }
};

struct Silu {
  static __device__ __forceinline__ float apply(float x) {
    return __fdividef(x, 1.f + __expf(-x));
  }
};

struct Sigmoid {
  static __device__ __forceinline__ float apply(float x) { return logistic(x); }
};

struct Tanh {
  static __device__ __forceinline__ float apply(float x) { return tanhf(x); }
};

// Calls `visit` with the functor of `activation`; a uniform branch around unrolled arithmetic.
template <typename Visitor>
__device__ __forceinline__ void visit_activation(Activation activation, Visitor&& visit) {
  switch (activation) {
    case Activation::kNone:
      return;
    case Activation::kRelu:
      return visit(Relu{});
    case Activation::kGelu:
      return visit(Gelu{});
    case Activation::kGeluExact:
      return visit(GeluExact{});
    case Activation::kSilu:
      return visit(Silu{});
    case Activation::kSigmoid:
      return visit(Sigmoid{});
    case Activation::kTanh:
      return visit(Tanh{});
  }
}

}  // namespace jax_tcgemm
