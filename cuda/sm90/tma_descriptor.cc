#include "sm90/tma_descriptor.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <array>
#include <cstring>
#include <string>

#include "common/driver.h"
#include "epilogue/work.h"
#include "sm90/output/output_tile.h"

namespace jax_tcgemm::sm90 {
namespace {

static_assert(sizeof(TensorMap) == sizeof(CUtensorMap));

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// Finds the driver's function once.
Status find_encoder(EncodeTiled* encode) {
  static EncodeTiled found = nullptr;
  static const Status status = find_driver_function("cuTensorMapEncodeTiled", &found);
  *encode = found;
  return status;
}

// A tensor and the box that one copy takes from it. The contiguous dimension comes first.
struct Tiling {
  const char* name;
  CUtensorMapDataType type;
  const void* data;
  int bytes;  // of an element
  cuuint32_t rank;
  std::array<cuuint64_t, 5> extent;
  std::array<cuuint64_t, 5> stride;  // in bytes; that of dimension 0 is not used
  std::array<cuuint32_t, 5> box;
  CUtensorMapSwizzle swizzle;
  CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
};

template <typename Values>
std::string join(const Values& values, size_t count) {
  std::string text;
  for (size_t i = 0; i < count; ++i) text += (i ? ", " : "") + std::to_string(values[i]);
  return "(" + text + ")";
}

Status encode(const Tiling& t, TensorMap* map) {
  EncodeTiled encode_tiled = nullptr;
  JAX_TCGEMM_RETURN_IF_ERROR(find_encoder(&encode_tiled));
  static constexpr cuuint32_t kElementStrides[5] = {1, 1, 1, 1, 1};
  const CUresult result = encode_tiled(
      reinterpret_cast<CUtensorMap*>(map), t.type, t.rank, const_cast<void*>(t.data),
      t.extent.data(), t.stride.data() + 1, t.box.data(), kElementStrides,
      CU_TENSOR_MAP_INTERLEAVE_NONE, t.swizzle, t.promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return Status();
  return make_status(Status::Code::kInternal, base_name(__FILE__), __LINE__,
                     "cuTensorMapEncodeTiled", "CUresult ", static_cast<int>(result), " for ",
                     t.name, ": type ", static_cast<int>(t.type), ", address ", t.data, ", rank ",
                     t.rank, ", extents ", join(t.extent, t.rank), ", byte strides ",
                     join(t.stride, t.rank), ", box ", join(t.box, t.rank), ", swizzle ",
                     static_cast<int>(t.swizzle));
}

CUtensorMapDataType data_type(ElementType type) {
  switch (type) {
#define JAX_TCGEMM_CASE(Type, kBytes, Device, Ffi, Tma) \
  case ElementType::Type:                               \
    return CU_TENSOR_MAP_DATA_TYPE_##Tma;
    JAX_TCGEMM_ELEMENT_TYPES(JAX_TCGEMM_CASE)
#undef JAX_TCGEMM_CASE
  }
  return CU_TENSOR_MAP_DATA_TYPE_UINT8;
}

// Adds the batch as dimensions 2 and up. Dimensions along which the operand does not move have one
// element.
void add_batch(const GemmParams& params, const BatchStrides& strides, Tiling* t,
               uint8_t (*moves)[kMaxBatchRank]) {
  t->rank = params.batch_rank <= 1 ? 3 : 5;
  for (cuuint32_t i = 0; i < t->rank - 2; ++i) {
    const bool moving = static_cast<int>(i) < params.batch_rank && strides.stride[i] != 0;
    (*moves)[i] = moving;
    t->extent[2 + i] = moving ? params.batch_shape[i] : 1;
    t->stride[2 + i] = moving ? strides.stride[i] * t->bytes : 16;
    t->box[2 + i] = 1;
  }
}

// Encodes A or B. TMA loads a tile in boxes of 128 bytes by rows, and each of `sharers` blocks
// loads a part.
Status encode_operand(const char* name, const Operand& operand, Major major, int32_t extent_mn,
                      int tile_mn, int sharers, const GemmParams& params,
                      const KernelConfig& config, TensorMap* map, uint8_t (*moves)[kMaxBatchRank],
                      bool pairs = false) {
  const bool k_major = major == Major::kK;
  const int32_t k = pairs ? params.k / 2 : params.k;
  const int tile_k = pairs ? config.tile_k / 2 : config.tile_k;
  Tiling t = {};
  t.name = name;
  t.bytes = element_bytes(config.algorithm);
  const Arithmetic arithmetic = arithmetic_of(config.algorithm);
  // TMA rounds to tf32 during the copy, as XLA does. wgmma itself would truncate.
  t.type = arithmetic.rounds_to_tf32 ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32 : data_type(arithmetic.a);
  t.data = operand.data;
  t.extent[0] = k_major ? k : extent_mn;
  t.extent[1] = k_major ? extent_mn : k;
  // A single row has no stride of its own.
  t.stride[1] = operand.ld != 0 ? operand.ld * t.bytes : (t.extent[0] * t.bytes + 15) / 16 * 16;
  const int row_bytes = k_major ? 128 : config.mn_row_bytes(tile_mn);
  t.box[0] = row_bytes / t.bytes;
  // The same division of a tile among its sharers as in sm90/producer.cuh.
  const int slabs = (tile_mn * t.bytes + 127) / 128;
  t.box[1] = k_major                ? loaded_rows(config, extent_mn, tile_mn, sharers) / sharers
             : slabs % sharers == 0 ? tile_k
                                    : tile_k / sharers;
  t.swizzle = row_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
              : row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                : CU_TENSOR_MAP_SWIZZLE_32B;
  add_batch(params, operand.batch, &t, moves);
  return encode(t, map);
}

// Encodes C, D or the pre-activation: (batch, m, n).
Status encode_result(const char* name, const void* data, int64_t stride_m, int64_t stride_batch,
                     bool whole_rows, const GemmProblem& problem, const KernelConfig& config,
                     TensorMap* map) {
  const GemmParams& params = problem.params;
  Tiling t = {};
  t.name = name;
  t.type = data_type(params.epilogue.d_type);
  t.bytes = element_bytes(params.epilogue.d_type);
  t.data = data;
  t.rank = 3;
  const auto n = static_cast<cuuint64_t>(params.n);
  const auto m = static_cast<cuuint64_t>(params.m);
  t.extent = {n, m, stride_batch != 0 ? static_cast<cuuint64_t>(params.batch) : 1};
  t.stride = {0, static_cast<cuuint64_t>(stride_m) * t.bytes,
              stride_batch != 0 ? static_cast<cuuint64_t>(stride_batch) * t.bytes : 16};
  const OutputBox box = output_box(
      config, t.bytes, swaps_operands(config, problem.major_a, problem.major_b), whole_rows);
  t.box = {static_cast<cuuint32_t>(box.row_bytes / t.bytes), static_cast<cuuint32_t>(box.rows), 1};
  t.swizzle = box.row_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  return encode(t, map);
}

bool is_multiple_of_16(int64_t bytes) { return bytes % 16 == 0; }

bool is_aligned(const void* data) { return is_multiple_of_16(reinterpret_cast<intptr_t>(data)); }

// Returns what the kernel has to do. kAddBias and kAddC need a D of the algorithm's output type.
// Exception: a skinny kernel adds a bias to any D.
Finish finish_of(const EpilogueParams& epilogue, const TensorMaps& maps, bool swap_ab,
                 const KernelConfig& config) {
  const EpilogueWork work = work_of(epilogue);
  if (work == EpilogueWork::kNone && (maps.d_by_tma || config.skinny)) return Finish::kProduct;
  if (config.skinny) {
    const bool is_line = work == EpilogueWork::kSum && epilogue.c.data == nullptr;
    return is_line ? Finish::kAddBias : Finish::kAnything;
  }
  if (epilogue.aux != nullptr || epilogue.row_scale.data != nullptr ||
      epilogue.column_scale.data != nullptr) {
    return Finish::kAnything;
  }
  if (!maps.d_by_tma) {
    const bool adds_bias = work != EpilogueWork::kAny && epilogue.c.data == nullptr;
    return adds_bias && !swap_ab ? Finish::kRows : Finish::kAnything;
  }
  const bool unrolls = config.swap_ab || (config.unrolls_sums() && !swap_ab);
  const bool unrolled = work == EpilogueWork::kSum && unrolls &&
                        epilogue.d_type == arithmetic_of(config.algorithm).output;
  if (epilogue.c.data == nullptr) return unrolled ? Finish::kAddBias : Finish::kActivate;
  return unrolled && maps.c_by_tma ? Finish::kAddC : Finish::kAnything;
}

bool has_skinny_finish(const KernelConfig& config, Finish finish) {
  return finish == Finish::kProduct || config.epilogue == EpilogueWork::kAny ||
         (finish == Finish::kAddBias && config.epilogue == EpilogueWork::kSum);
}

// The operand that the kernel calls A gives the rows of the accumulators.
void describe_factors(const GemmProblem& problem, const KernelConfig& config, TensorMaps* maps) {
  const GemmParams& params = problem.params;
  maps->swap_ab = swaps_operands(config, problem.major_a, problem.major_b, params.m, params.n);
  maps->major_a = maps->swap_ab ? problem.major_b : problem.major_a;
  maps->major_b = maps->swap_ab ? problem.major_a : problem.major_b;
}

}  // namespace

bool d_by_tma(const GemmProblem& problem) {
  const EpilogueParams& epilogue = problem.params.epilogue;
  return is_multiple_of_16(int64_t{problem.params.n} * element_bytes(epilogue.d_type)) &&
         is_aligned(epilogue.d) && is_aligned(epilogue.aux) && is_aligned(epilogue.aux2);
}

bool c_by_tma(const GemmProblem& problem) {
  const EpilogueParams& epilogue = problem.params.epilogue;
  const Addend& c = epilogue.c;
  const int bytes = element_bytes(epilogue.d_type);
  return c.data != nullptr && c.type == epilogue.d_type && c.stride_n == 1 && c.stride_m > 0 &&
         is_multiple_of_16(c.stride_m * bytes) && problem.params.batch_rank <= 1 &&
         is_multiple_of_16(c.batch.stride[0] * bytes) && is_aligned(c.data) &&
         is_aligned(epilogue.c2.data);
}

void describe(const GemmProblem& problem, const KernelConfig& config, TensorMaps* maps) {
  describe_factors(problem, config, maps);
  maps->d_by_tma = !config.skinny && d_by_tma(problem);
  maps->c_by_tma = maps->d_by_tma && c_by_tma(problem);
  maps->has_c2 = maps->c_by_tma && problem.params.epilogue.c2.data != nullptr;
  maps->finish = finish_of(problem.params.epilogue, *maps, maps->swap_ab, config);
}

Status encode_packed_rows(const void* data, ElementType type, int64_t batch, int64_t m, int64_t k,
                          int rows, int k_blocks, TensorMap* map) {
  constexpr int kBlock = 64;
  Tiling t = {};
  t.name = "x";
  t.type = data_type(type);
  t.data = data;
  t.bytes = 2;
  t.rank = 5;
  const auto extent = [](int64_t value) { return static_cast<cuuint64_t>(value); };
  t.extent = {kBlock, extent(m), extent(k / kBlock), extent(batch), 1};
  t.stride = {0, extent(k * t.bytes), kBlock * 2, extent(m * k * t.bytes), 16};
  t.box = {kBlock, static_cast<cuuint32_t>(rows), static_cast<cuuint32_t>(k_blocks), 1, 1};
  t.swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  t.promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
  return encode(t, map);
}

Status encode_factors(const GemmProblem& problem, const KernelConfig& config, TensorMaps* maps) {
  const GemmParams& params = problem.params;
  describe_factors(problem, config, maps);
  const bool swap_ab = maps->swap_ab;
  JAX_TCGEMM_RETURN_IF_ERROR(encode_operand(
      "a", params.a, problem.major_a, params.m, swap_ab ? config.tile_n : config.tile_m,
      swap_ab ? config.cluster_m : config.cluster_n, params, config, swap_ab ? &maps->b : &maps->a,
      swap_ab ? &maps->b_moves : &maps->a_moves));
  JAX_TCGEMM_RETURN_IF_ERROR(encode_operand(
      "b", params.b, problem.major_b, params.n, swap_ab ? config.output_m() : config.output_n(),
      swap_ab ? config.cluster_n : config.cluster_m, params, config, swap_ab ? &maps->a : &maps->b,
      swap_ab ? &maps->a_moves : &maps->b_moves, config.pairs));
  if (config.gated) {
    Operand b2 = params.b;
    b2.data = params.b2;
    JAX_TCGEMM_RETURN_IF_ERROR(encode_operand(
        "b2", b2, problem.major_b, params.n, swap_ab ? config.output_m() : config.output_n(),
        swap_ab ? config.cluster_n : config.cluster_m, params, config, &maps->b2,
        swap_ab ? &maps->a_moves : &maps->b_moves));
  }
  return Status();
}

Status encode_tensor_maps(const GemmProblem& problem, const KernelConfig& config,
                          TensorMaps* maps) {
  const GemmParams& params = problem.params;
  JAX_TCGEMM_RETURN_IF_ERROR(encode_factors(problem, config, maps));
  const EpilogueParams& epilogue = params.epilogue;
  describe(problem, config, maps);
  // Parts of k are added only if D leaves by TMA and there is no C (Output::finish_sum).
  const bool adds_parts = params.fixup.parts > 0;
  const bool has_code = config.skinny
                            ? has_skinny_finish(config, maps->finish)
                            : config.split_k > 1 || has_finish(config, maps->finish, maps->swap_ab);
  const bool has_sum = maps->d_by_tma && epilogue.c.data == nullptr;
  JAX_TCGEMM_REQUIRE(has_code && (!adds_parts || has_sum), "the kernel has no epilogue ",
                     static_cast<int>(maps->finish), " for ", params.fixup.parts, " parts of k");
  if (!maps->d_by_tma) return Status();
  // All groups' rows form one matrix, and parts of k form one matrix.
  const bool one_matrix = config.grouped == Grouped::kM || adds_parts;
  const int64_t matrix = one_matrix ? 0 : int64_t{params.m} * params.n;
  JAX_TCGEMM_RETURN_IF_ERROR(encode_result("d", epilogue.d, params.n, matrix,
                                           in_whole_rows(maps->finish), problem, config, &maps->d));
  if (epilogue.aux != nullptr) {
    JAX_TCGEMM_RETURN_IF_ERROR(
        encode_result("aux", epilogue.aux, params.n, matrix, false, problem, config, &maps->aux));
  }
  if (epilogue.aux2 != nullptr) {
    JAX_TCGEMM_RETURN_IF_ERROR(encode_result("aux2", epilogue.aux2, params.n, matrix, false,
                                             problem, config, &maps->aux2));
  }
  if (maps->c_by_tma) {
    const Addend& c = epilogue.c;
    maps->c_moves = params.batch_rank == 1 && c.batch.stride[0] != 0;
    const int64_t stride_batch = maps->c_moves ? c.batch.stride[0] : 0;
    JAX_TCGEMM_RETURN_IF_ERROR(
        encode_result("c", c.data, c.stride_m, stride_batch, false, problem, config, &maps->c));
    if (maps->has_c2) {
      JAX_TCGEMM_RETURN_IF_ERROR(encode_result("c2", epilogue.c2.data, c.stride_m, stride_batch,
                                               false, problem, config, &maps->c2));
    }
  }
  return Status();
}

}  // namespace jax_tcgemm::sm90
