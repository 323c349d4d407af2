// The activation functors and their derivatives, from float32 to float32.
// jax_tcgemm/problem/activations.py has the same C++ names, and the jnp functions that the tests
// compare them with.
//
// All functors are accurate to a few float32 roundings. exp and reciprocal use the fast
// instructions (2 ulp). No functor uses tanh.approx, whose error of 2^-11 would show in float32
// results. A logistic function below 2^-60 counts as 0. NaN and infinities give the results of the
// jnp functions and do not change neighbouring values; tests/test_special_values.py checks both.

#pragma once

#include <concepts>

#include "epilogue/fast_math.cuh"
#include "epilogue/known.cuh"
#include "gemm_params.h"

namespace jax_tcgemm {

// scale(x) / (1 + exp(-argument(x))). The function has two parts, so that two values can share a
// reciprocal: an epilogue of this form waits for the special-function unit. The slopes are the
// derivatives of the parts.
template <typename T>
concept LogisticFunctor = requires(const T& functor, float x) {
  { functor.scale(x) } -> std::same_as<float>;
  { functor.scale_slope() } -> std::same_as<float>;
  { functor.argument(x) } -> std::same_as<float>;
  { functor.argument_slope(x) } -> std::same_as<float>;
};

template <typename T>
concept PointwiseFunctor = requires(const T& functor, float x) {
  { functor.apply(x) } -> std::same_as<float>;
  { functor.derivative(x) } -> std::same_as<float>;
};

template <typename T>
concept ActivationFunctor = LogisticFunctor<T> || PointwiseFunctor<T>;

// A functor's parameters are the first of these values.
using ActivationParameters = float[kActivationParameters];

struct Relu {
  __device__ __forceinline__ float apply(float x) const { return maximum(x, 0.f); }
  // 0 at NaN, like jax.nn.relu.
  __device__ __forceinline__ float derivative(float x) const { return x > 0.f ? 1.f : 0.f; }
};

struct ReluSquared {
  __device__ __forceinline__ float apply(float x) const {
    const float y = maximum(x, 0.f);
    return y * y;
  }
  __device__ __forceinline__ float derivative(float x) const { return 2.f * maximum(x, 0.f); }
};

struct Gelu {
  // 0.5 x (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3) equals x / (1 + exp(-2 u)), which
  // has no cancellation where tanh is near -1.
  static constexpr float kTwice = 1.5957691216057308f;  // 2 sqrt(2 / pi)
  __device__ __forceinline__ float scale(float x) const { return x; }
  __device__ __forceinline__ float scale_slope() const { return 1.f; }
  __device__ __forceinline__ float argument(float x) const {
    return x * fmaf(kTwice * 0.044715f * x, x, kTwice);
  }
  __device__ __forceinline__ float argument_slope(float x) const {
    return fmaf(3.f * kTwice * 0.044715f * x, x, kTwice);
  }
};

struct GeluExact {
  __device__ __forceinline__ float apply(float x) const {
    return 0.5f * x * erfcf(-0.7071067811865476f * x);
  }
  __device__ __forceinline__ float derivative(float x) const {
    constexpr float kDensity = 0.3989422804014327f;  // 1 / sqrt(2 pi)
    return fmaf(kDensity * x, __expf(-0.5f * x * x), 0.5f * erfcf(-0.7071067811865476f * x));
  }
};

struct Silu {
  __device__ __forceinline__ float scale(float x) const { return x; }
  __device__ __forceinline__ float scale_slope() const { return 1.f; }
  __device__ __forceinline__ float argument(float x) const { return x; }
  __device__ __forceinline__ float argument_slope(float) const { return 1.f; }
};

struct Sigmoid {
  // NaN at NaN: with values in pairs, no other part of the quotient keeps NaN.
  __device__ __forceinline__ float scale(float x) const { return x == x ? 1.f : x; }
  __device__ __forceinline__ float scale_slope() const { return 0.f; }
  __device__ __forceinline__ float argument(float x) const { return x; }
  __device__ __forceinline__ float argument_slope(float) const { return 1.f; }
};

struct Tanh {
  __device__ __forceinline__ float apply(float x) const { return tanhf(x); }
  __device__ __forceinline__ float derivative(float x) const {
    const float t = tanhf(x);
    return fmaf(-t, t, 1.f);
  }
};

struct Softcap {
  float cap;
  __device__ __forceinline__ explicit Softcap(const ActivationParameters& p) : cap(p[0]) {}
  __device__ __forceinline__ float apply(float x) const { return cap * tanhf(x / cap); }
  __device__ __forceinline__ float derivative(float x) const { return Tanh().derivative(x / cap); }
};

struct Clip {
  float low, high;
  __device__ __forceinline__ explicit Clip(const ActivationParameters& p) : low(p[0]), high(p[1]) {}
  __device__ __forceinline__ float apply(float x) const { return minimum(high, maximum(low, x)); }
  // Half at a bound, where jnp.minimum and jnp.maximum divide a cotangent evenly; 0 at NaN.
  __device__ __forceinline__ float derivative(float x) const {
    const float from_low = x > low ? 1.f : x == low ? 0.5f : 0.f;
    x = x < low ? low : x;
    return from_low * (x < high ? 1.f : x == high ? 0.5f : 0.f);
  }
};

constexpr float kMinusLog2E = -1.4426950408889634f;

// 1 / (1 + exp(-x)): 0 where exp(-x) overflows; NaN at NaN.
__device__ __forceinline__ float sigma(float x) {
  return fast_reciprocal(1.f + fast_exp2(kMinusLog2E * x));
}

// One of two values that share a reciprocal. one_plus_exp is 1 + exp(-x) up to 1 + 2^60, with
// factor 1. Beyond that, factor is 0 and one_plus_exp stays 1 + 2^60. The product of two sums is
// therefore finite and its reciprocal above 2^-126, so that one value does not change the other.
// NaN counts as beyond: fminf and the saturation drop it, and the scale restores it.
struct HalfOfPair {
  float one_plus_exp, factor;
  __device__ __forceinline__ explicit HalfOfPair(float x) {
    constexpr float kLargest = 60.f;
    constexpr float kSteep = 1048576.f;
    const float exponent = kMinusLog2E * x;
    one_plus_exp = 1.f + fast_exp2(fminf(exponent, kLargest));
    factor = __saturatef(fmaf(exponent, -kSteep, kLargest * kSteep));
  }
};

template <ActivationFunctor Functor, int kWidth>
__device__ __forceinline__ void apply_activation(const Functor& functor, float (&x)[kWidth]) {
  if constexpr (PointwiseFunctor<Functor>) {
#pragma unroll
    for (float& value : x) value = functor.apply(value);
  } else if constexpr (kWidth == 1) {
    x[0] = functor.scale(x[0]) * sigma(functor.argument(x[0]));
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; i += 2) {
      const HalfOfPair first(functor.argument(x[i]));
      const HalfOfPair second(functor.argument(x[i + 1]));
      const float reciprocal = fast_reciprocal(first.one_plus_exp * second.one_plus_exp);
      // The scale comes last: an infinite scale times a quotient of 0 is NaN.
      x[i] = functor.scale(x[i]) * (first.factor * (reciprocal * second.one_plus_exp));
      x[i + 1] = functor.scale(x[i + 1]) * (second.factor * (reciprocal * first.one_plus_exp));
    }
  }
}

// Sets x to f(x) and slope to f'(x).
template <ActivationFunctor Functor>
__device__ __forceinline__ void differentiate(const Functor& functor, float& x, float& slope) {
  if constexpr (PointwiseFunctor<Functor>) {
    slope = functor.derivative(x);
    x = functor.apply(x);
  } else {
    // s sigma(a): s' sigma + s sigma (1 - sigma) a'
    const float quotient = sigma(functor.argument(x));
    const float value = functor.scale(x) * quotient;
    slope =
        fmaf(value * (1.f - quotient), functor.argument_slope(x), functor.scale_slope() * quotient);
    x = value;
  }
}

// Stands for no activation.
struct Identity {
  __device__ __forceinline__ float apply(float x) const { return x; }
  __device__ __forceinline__ float derivative(float) const { return 1.f; }
};

// Calls `visit` with the functor of the activation. The uniform branch stands around unrolled
// arithmetic.
template <typename Visitor>
__device__ __forceinline__ void visit_activation(const EpilogueParams& epilogue, Visitor&& visit) {
  const auto call = [&]<typename Functor>(const Functor* /*type*/) {
    if constexpr (std::constructible_from<Functor, const ActivationParameters&>) {
      visit(Functor(epilogue.activation_parameters));
    } else {
      visit(Functor());
    }
  };
  switch (known_activation(epilogue)) {
    case Activation::kNone:
      return visit(Identity());
#define JAX_TCGEMM_VISIT(Name) \
  case Activation::k##Name:    \
    return call(static_cast<const Name*>(nullptr));
      JAX_TCGEMM_ACTIVATIONS(JAX_TCGEMM_VISIT)
#undef JAX_TCGEMM_VISIT
  }
}

// Stands for any activation and branches on each call.
struct AnyActivation {
  const EpilogueParams& epilogue;
};

template <int kWidth>
__device__ __forceinline__ void apply_activation(const AnyActivation& any, float (&x)[kWidth]) {
  visit_activation(any.epilogue, [&]<ActivationFunctor Functor>(const Functor& functor) {
    apply_activation(functor, x);
  });
}

// The same for a visitor that contains a loop. The activations of today's models have a loop each,
// without a branch in it. The others share one loop, because a loop for each would dominate the
// compile time.
template <typename Visitor>
__device__ __forceinline__ void visit_common_activation(const EpilogueParams& epilogue,
                                                        Visitor&& visit) {
  switch (known_activation(epilogue)) {
    case Activation::kGelu:
      return visit(Gelu());
    case Activation::kSilu:
      return visit(Silu());
    default:
      return visit(AnyActivation{epilogue});
  }
}

}  // namespace jax_tcgemm
