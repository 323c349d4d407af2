// Arithmetic: the types of operands, sums and results. The rows are in
// jax_tcgemm/kernels/arithmetic.py; generate.py writes them as lists for the preprocessor.

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

// Returns the bytes of an element. It is a switch because device code cannot read a host array.
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
  // D has this type, or a wider one.
  ElementType output;
  ElementType wide_output;
  // float32 operands are rounded to tf32 before they are multiplied.
  bool rounds_to_tf32;
  // There are kernels for Hopper.
  bool wgmma;
  // wgmma takes only k-major operands from shared memory.
  bool k_major;
  // A wide result needs parts of k added up in float32 (KernelConfig::promote).
  bool promotes;
  // The build has no kernels for this row: each is compiled at run time, with its epilogue.
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

// Returns the bytes of an element of A and B.
constexpr int element_bytes(Algorithm algorithm) {
  return element_bytes(arithmetic_of(algorithm).a);
}

// A product of float32 operands, computed as products of their planes.
struct PlaneProduct {
  const char* name;
  Algorithm factors;  // multiplies planes
  int count;          // planes of an operand
  int order;          // of the smallest products that count
  int products;       // number of products that count
};

constexpr PlaneProduct kPlaneProducts[] = {
#define JAX_TCGEMM_ROW(kName, Factors, ...) {kName, Algorithm::Factors, __VA_ARGS__},
    JAX_TCGEMM_PLANE_PRODUCTS(JAX_TCGEMM_ROW)
#undef JAX_TCGEMM_ROW
};

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_ARITHMETIC_H_
