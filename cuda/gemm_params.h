// Parameters of one kernel launch. They are passed by value as a __grid_constant__ kernel
// parameter, so they are plain data without host types.

#ifndef JAX_TCGEMM_GEMM_PARAMS_H_
#define JAX_TCGEMM_GEMM_PARAMS_H_

#include <stdint.h>

#include "arithmetic.h"
#include "common/fast_divisor.h"
#include "shared_limits.h"

namespace jax_tcgemm {

// Batch dimensions left after folding; each operand has its own stride in each (0 = broadcast).
constexpr int kMaxBatchRank = 4;

// The activations, with their C++ names in jax_tcgemm/problem/activations.py. Each is a functor in
// epilogue/activations.cuh.
#define JAX_TCGEMM_ACTIVATIONS(X) \
  X(Relu) X(ReluSquared) X(Gelu) X(GeluExact) X(Silu) X(Sigmoid) X(Tanh) X(Softcap) X(Clip)

// The most parameters of an activation.
constexpr int kActivationParameters = 2;

enum class Activation {
  kNone,
#define JAX_TCGEMM_ENUMERATOR(name) k##name,
  JAX_TCGEMM_ACTIVATIONS(JAX_TCGEMM_ENUMERATOR)
#undef JAX_TCGEMM_ENUMERATOR
};

// The use of C in the epilogue, with z = alpha * scales * acc + bias:
//   kAdd:             D = f(z + beta * C)
//   kResidual:        D = f(z) + beta * C
//   kFactor:          D = f(z) * C
//   kDerivative:      D = z * f'(C)
//   kGatedDerivative: D = z * C2 * f'(C), and the second result is z * f(C)
enum class RoleOfC { kAdd, kResidual, kFactor, kDerivative, kGatedDerivative };

// The dimension along which consecutive tiles of one raster group follow each other.
enum class RasterOrder { kAlongM, kAlongN };

// The order of tiles: see scheduler/raster.cuh.
struct Raster {
  RasterOrder order;
  FastDivisor tiles;  // of one matrix
  FastDivisor tiles_per_group;
  FastDivisor width;       // tiles of a group along `order`
  FastDivisor last_width;  // the same for the last group
  int32_t last_group;
  int32_t stride_index;  // blocks of the grid, as tiles of a matrix ...
  int32_t stride_batch;  // ... and whole matrices
};

struct BatchStrides {
  int64_t stride[kMaxBatchRank];  // elements
};

// A or B: (batch, mn, k), where mn or k is contiguous; `ld` is the stride of the other dimension.
struct Operand {
  const void* data;
  int64_t ld;
  int64_t span;  // elements from `data` to the end of the last one that may be read
  BatchStrides batch;
};

// C, a bias or a scale: (batch, m, n) with any strides, in the type of D or in float32.
struct Addend {
  const void* data;  // null: absent
  int64_t stride_m;
  int64_t stride_n;
  BatchStrides batch;
  ElementType type;
  bool vectorizable;  // 4 neighbouring columns are contiguous and aligned to their size
};

// alpha or beta: a number, or one number per batch in device memory.
struct Scalar {
  float value;
  const float* data;  // null: `value` counts
  BatchStrides batch;
};

// Gated: with g = A B + bias and u = A B2 + bias2, D = f(g) * u, and aux and aux2 are g and u.
struct EpilogueParams {
  Scalar alpha;
  Scalar beta;
  Addend c;
  Addend c2;            // strides of c
  Addend bias;          // stride_m = 0
  Addend bias2;         // likewise
  Addend row_scale;     // float32, stride_n = 0
  Addend column_scale;  // float32, stride_m = 0
  RoleOfC role_of_c;
  bool gated;
  Activation activation;
  float activation_parameters[kActivationParameters];
  void* d;     // (batch, m, n), contiguous
  void* aux;   // (batch, m, n), contiguous: the pre-activation; null: not requested
  void* aux2;  // likewise
  ElementType d_type;
  bool d_vectorizable;  // likewise D and aux
};

// Parts of k that the kernel itself adds up (sm90/split_k/in_workspace.cuh).
struct Fixup {
  int32_t parts;    // 0: none
  char* partials;   // accumulators of warps
  uint64_t* flags;  // one for each warp's accumulators
  uint64_t launch;  // the value of a flag that is set
};

// Scales of planes. A product of order i is multiplied by 2^-(bits i), and the sum by 2^-shift[0]
// and 2^-shift[1].
struct PlaneScale {
  int32_t bits;
  int32_t shift[2];
};

// A and B are bfloat16 planes of float32 operands (passes/split_planes.h). An operand's planes
// follow each other along k, each in whole k-tiles; GemmParams::k is the extent of all planes
// together. A product of planes i and j has order i + j.
struct Planes {
  int32_t count;            // of an operand; 0: A and B are no planes
  int32_t order;            // of the smallest products that count
  int32_t k_tiles;          // of one plane
  const PlaneScale* scale;  // in device memory
};

struct GemmParams {
  int32_t m, n, k;       // with planes, k is the extent of all planes together
  int32_t batch;         // product of batch_shape; with split_stages, the number of parts of k
  int32_t split_stages;  // > 0: matrix i of the batch is the product over so many stages of k
  // sm90: layouts of what the kernel calls A and B. They are in the parameters' first cache line,
  // because a kernel for several layouts reads them before the first load.
  bool k_major_a, k_major_b;
  Fixup fixup;    // adds up the parts of k; without it each matrix is one of D
  Raster raster;  // set when a configuration has been chosen
  Operand a;
  Operand b;
  const void* b2;  // the second weight of a gated product, laid out as b
  EpilogueParams epilogue;
  const int32_t* group_sizes;  // ragged: sizes of the batch's groups; see scheduler/ragged.cuh
  int32_t batch_rank;
  int32_t batch_shape[kMaxBatchRank];
  Planes planes;
  // B holds complex numbers x + i y in half as many rows and columns. It stands for the real matrix
  // of ((x, y), (-y, x)). Its strides count real and imaginary parts.
  bool pairs_of_b;
};

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_GEMM_PARAMS_H_
