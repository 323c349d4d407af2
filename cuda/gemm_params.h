// What one kernel launch needs. Passed by value as a __grid_constant__ kernel parameter, so it is
// plain data without host types.

#ifndef JAX_TCGEMM_GEMM_PARAMS_H_
#define JAX_TCGEMM_GEMM_PARAMS_H_

#include <stdint.h>

#include "arithmetic.h"
#include "common/fast_divisor.h"
#include "shared_limits.h"

namespace jax_tcgemm {

// Batch dimensions left after folding; each operand has its own stride in each (0 = broadcast).
constexpr int kMaxBatchRank = 4;

// The activations, by their C++ names in jax_tcgemm/problem/activations.py; each is a functor in
// epilogue/activations.cuh.
#define JAX_TCGEMM_ACTIVATIONS(X) \
  X(Relu) X(ReluSquared) X(Gelu) X(GeluExact) X(Silu) X(Sigmoid) X(Tanh) X(Softcap) X(Clip)

// Numbers that an activation may be given.
constexpr int kActivationParameters = 2;

enum class Activation {
  kNone,
#define JAX_TCGEMM_ENUMERATOR(name) k##name,
  JAX_TCGEMM_ACTIVATIONS(JAX_TCGEMM_ENUMERATOR)
#undef JAX_TCGEMM_ENUMERATOR
};

// What the epilogue does with C, once z = alpha * scales * acc + bias:
//   kAdd:             D = f(z + beta * C)
//   kResidual:        D = f(z) + beta * C
//   kFactor:          D = f(z) * C
//   kDerivative:      D = z * f'(C)
//   kGatedDerivative: D = z * C2 * f'(C), and the second result is z * f(C)
enum class RoleOfC { kAdd, kResidual, kFactor, kDerivative, kGatedDerivative };

// Along which dimension consecutive tiles of one raster group go.
enum class RasterOrder { kAlongM, kAlongN };

// The order of tiles: see scheduler/raster.cuh.
struct Raster {
  RasterOrder order;
  FastDivisor tiles;  // of one matrix
  FastDivisor tiles_per_group;
  FastDivisor width;       // tiles of a group along `order`
  FastDivisor last_width;  // the same of the last group
  int32_t last_group;
  int32_t stride_index;  // blocks of the grid, as tiles of a matrix ...
  int32_t stride_batch;  // ... and whole matrices
};

struct BatchStrides {
  int64_t stride[kMaxBatchRank];  // elements
};

// A or B: (batch, mn, k) with one of mn, k contiguous; `ld` is the stride of the other one.
struct Operand {
  const void* data;
  int64_t ld;
  int64_t span;  // elements from `data` to the end of the last one that may be read
  BatchStrides batch;
};

// C: (batch, m, n) with any strides, in the type of D or in float32.
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
  const float* data;  // null: `value` holds
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
  void* aux;   // (batch, m, n), contiguous: the pre-activation; null: not asked for
  void* aux2;  // likewise
  ElementType d_type;
  bool d_vectorizable;  // likewise D and aux
};

// Parts of k that the kernel itself adds up (sm90/split_k/in_workspace.cuh).
struct Fixup {
  int32_t parts;    // 0: none
  char* partials;   // accumulators of warps
  uint64_t* flags;  // one for each of those
  uint64_t launch;  // the value of a flag that is set
};

// Products of planes of order i count 2^-(bits i) times, and the sum 2^-shift[0] 2^-shift[1] times.
struct PlaneScale {
  int32_t bits;
  int32_t shift[2];
};

// A and B are bfloat16 planes of float32 operands (passes/split_planes.h), one after the other
// along k, each of whole k-tiles; GemmParams::k is that of all of them. A product of planes i and j
// is of order i + j.
struct Planes {
  int32_t count;            // of an operand; 0: A and B are no planes
  int32_t order;            // of the smallest products that count
  int32_t k_tiles;          // of one plane
  const PlaneScale* scale;  // in device memory
};

struct GemmParams {
  int32_t m, n, k;       // with planes, k is that of all of them
  int32_t batch;         // product of batch_shape; with split_stages, the number of parts of k
  int32_t split_stages;  // > 0: matrix i of the batch is the product over so many stages of k
  // sm90: of what the kernel calls A and B. In the first line of the parameters, for a kernel of
  // several layouts asks for it before the first load.
  bool k_major_a, k_major_b;
  Fixup fixup;    // of these matrices; else each is one of D
  Raster raster;  // set when a configuration has been chosen
  Operand a;
  Operand b;
  const void* b2;  // the second weight of a gated product, laid out as b
  EpilogueParams epilogue;
  const int32_t* group_sizes;  // ragged: of the batch's groups; see scheduler/ragged.cuh
  int32_t batch_rank;
  int32_t batch_shape[kMaxBatchRank];
  Planes planes;
  // B is of complex numbers x + i y, of half as many rows and columns, and stands for the real
  // matrix of ((x, y), (-y, x)). Its strides are in parts.
  bool pairs_of_b;
};

}  // namespace jax_tcgemm

#endif  // JAX_TCGEMM_GEMM_PARAMS_H_
