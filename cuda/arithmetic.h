// What is multiplied, in what it is added up, and what may come out. The rows stand in
// jax_tcgemm/kernels/arithmetic.py; generate.py writes them out as lists for the preprocessor.

#ifndef JAX_TCGEMM_ARITHMETIC_H_
#define JAX_TCGEMM_ARITHMETIC_H_

#include <stdint.h>

#include "arithmetic.inc"

namespace jax_tcgemm {

enum class ElementType {
#define JAX_TCGEMM_ENUMERATOR(Type, kBytes, Device, Ffi, Tma) Type,
  JAX_TCGEMM_ELEMENT_TYPES(JAX_TCGEMM_ENUMERATOR)
#undef JAX_TCGEMM_ENUMERATOR
};

// By cases: device code may read no array of the host.
constexpr int element_bytes(ElementType type) {
  switch (type) {
#define JAX_TCGEMM_BYTES(Type, kBytes, Device, Ffi, Tma) \
  case ElementType::Type:                                \
    return kBytes;
    JAX_TCGEMM_ELEMENT_TYPES(JAX_TCGEMM_BYTES)
#undef JAX_TCGEMM_BYTES
  }
  return 0;
}

// Named as in jax.lax.DotAlgorithmPreset: type of A, type of B, accumulator.
enum class Algorithm {
#define JAX_TCGEMM_ENUMERATOR(Name, ...) Name,
  JAX_TCGEMM_ALGORITHMS(JAX_TCGEMM_ENUMERATOR)
#undef JAX_TCGEMM_ENUMERATOR
};

struct Arithmetic {
  const char* name;
  ElementType a;
  ElementType b;
  ElementType accumulator;
  // D is of this type, or also of a wider one.
  ElementType output;
  ElementType wide_output;
  // float32 operands are rounded to tf32 before they are multiplied.
  bool rounds_to_tf32;
  // There are kernels for Hopper.
  bool wgmma;
  // wgmma takes k-major operands alone from shared memory.
  bool k_major;
  // A wide result wants parts of k added up in float32 (KernelConfig::promote).
  bool promotes;
  // The build has no kernels for it: each is compiled at run time, with its epilogue.
  bool at_run_time;
};

constexpr Arithmetic arithmetic_of(Algorithm algorithm) {
  switch (algorithm) {
#define JAX_TCGEMM_ROW(Name, kName, A, B, Sum, Out, Wide, ...) \
  case Algorithm::Name:                                        \
    return {kName,                                             \
            ElementType::A,                                    \
            ElementType::B,                                    \
            ElementType::Sum,                                  \
            ElementType::Out,                                  \
            ElementType::Wide,                                 \
            __VA_ARGS__};
    JAX_TCGEMM_ALGORITHMS(JAX_TCGEMM_ROW)
#undef JAX_TCGEMM_ROW
  }
  return {};
}

// Of A and B.
constexpr int element_bytes(Algorithm algorithm) {
  return element_bytes(arithmetic_of(algorithm).a);
}

// A product of float32 operands by products of their planes.
struct PlaneProduct {
  const char* name;
  Algorithm factors;  // of the products of planes
  int count;          // planes of an operand
  int order;          // of the smallest products that count
  int products;       // that count
};

constexpr PlaneProduct kPlaneProducts[] = {
#define JAX_TCGEMM_ROW(kName, Factors, ...) {kName, Algorithm::Factors, __VA_ARGS__},
    JAX_TCGEMM_PLANE_PRODUCTS(JAX_TCGEMM_ROW)
#undef JAX_TCGEMM_ROW
};

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_ARITHMETIC_H_
