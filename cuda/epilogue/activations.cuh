// The activation functors: float32 in, float32 out. Their names are the C++ names in
// jax_tcgemm/epilogues.py, whose jnp functions are what they are tested against.
//
// All are accurate to a few float32 roundings: exp and reciprocal by the fast instructions (2 ulp),
// nothing by tanh.approx, whose 2^-11 would show in float32 results.

#pragma once

#include <concepts>

#include "gemm_params.h"

namespace jax_tcgemm {

// scale(x) / (1 + exp(-argument(x))). Stated in two parts, so that two values can share a
// reciprocal: the special-function unit is what an epilogue of this form waits for.
template <typename T>
concept LogisticFunctor = requires(float x) {
  { T::scale(x) } -> std::same_as<float>;
  { T::argument(x) } -> std::same_as<float>;
};

template <typename T>
concept PointwiseFunctor = requires(float x) {
  { T::apply(x) } -> std::same_as<float>;
};

template <typename T>
concept ActivationFunctor = LogisticFunctor<T> || PointwiseFunctor<T>;

struct Relu {
  // Written so that NaN passes, as in jnp.maximum(x, 0).
  static __device__ __forceinline__ float apply(float x) { return x < 0.f ? 0.f : x; }
};

struct Gelu {
  // 0.5 x (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3), which is x / (1 + exp(-2 u)):
  // no cancellation where tanh is near -1.
  static __device__ __forceinline__ float scale(float x) { return x; }
  static __device__ __forceinline__ float argument(float x) {
    constexpr float kTwice = 1.5957691216057308f;  // 2 sqrt(2 / pi)
    return x * fmaf(kTwice * 0.044715f * x, x, kTwice);
  }
};

struct GeluExact {
  static __device__ __forceinline__ float apply(float x) {
    return 0.5f * x * erfcf(-0.7071067811865476f * x);
  }
};

struct Silu {
  static __device__ __forceinline__ float scale(float x) { return x; }
  static __device__ __forceinline__ float argument(float x) { return x; }
};

struct Sigmoid {
  static __device__ __forceinline__ float scale(float) { return 1.f; }
  static __device__ __forceinline__ float argument(float x) { return x; }
};

struct Tanh {
  static __device__ __forceinline__ float apply(float x) { return tanhf(x); }
};

// 1 + exp(-x). The power is capped at 2^60, where the quotient has long vanished, so that the
// product of two is finite.
__device__ __forceinline__ float one_plus_exp(float x) {
  constexpr float kLog2E = 1.4426950408889634f;
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(power) : "f"(fminf(-kLog2E * x, 60.f)));
  return 1.f + power;
}

template <ActivationFunctor Functor, int kWidth>
__device__ __forceinline__ void apply_activation(float (&x)[kWidth]) {
  if constexpr (PointwiseFunctor<Functor>) {
#pragma unroll
    for (float& value : x) value = Functor::apply(value);
  } else if constexpr (kWidth == 1) {
    x[0] = __fdividef(Functor::scale(x[0]), one_plus_exp(Functor::argument(x[0])));
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; i += 2) {
      const float first = one_plus_exp(Functor::argument(x[i]));
      const float second = one_plus_exp(Functor::argument(x[i + 1]));
      const float reciprocal = __fdividef(1.f, first * second);
      x[i] = Functor::scale(x[i]) * (reciprocal * second);
      x[i + 1] = Functor::scale(x[i + 1]) * (reciprocal * first);
    }
  }
}

// Calls `visit` with the functor of `activation`; a uniform branch around unrolled arithmetic.
template <typename Visitor>
__device__ __forceinline__ void visit_activation(Activation activation, Visitor&& visit) {
  switch (activation) {
    case Activation::kNone:
      return;
#define JAX_TCGEMM_VISIT(Name) \
  case Activation::k##Name:    \
    return visit(Name{});
      JAX_TCGEMM_ACTIVATIONS(JAX_TCGEMM_VISIT)
#undef JAX_TCGEMM_VISIT
  }
}

}  // namespace jax_tcgemm
