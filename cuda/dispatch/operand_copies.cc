#include "dispatch/operand_copies.h"

#include <algorithm>
#include <iterator>
#include <limits>

#include "common/ceil_div.h"
#include "common/saturating.h"
#include "dispatch/choice.h"
#include "dispatch/dispatch.h"
#include "passes/pad_operand.h"
#include "passes/split_planes.h"
#include "shared_limits.h"

namespace jax_tcgemm {
namespace {

// Replaces an unaligned operand by a padded copy in the workspace, of which `*used` bytes are
// taken. Returns false if there is no room. The caller makes the copy, by `pad`.
bool plan_padding(const GemmProblem& problem, Major major, int32_t extent_mn, Operand* operand,
                  PadProblem* pad, int64_t* used) {
  const GemmParams& params = problem.params;
  *pad = {};
  pad->in = *operand;
  pad->element_bytes = element_bytes(problem.algorithm);
  pad->rows = major == Major::kK ? extent_mn : params.k;
  pad->columns = major == Major::kK ? params.k : extent_mn;
  pad->batch_rank = params.batch_rank;
  std::copy(std::begin(params.batch_shape), std::end(params.batch_shape), pad->batch_shape);
  pad->out = static_cast<char*>(problem.workspace) + *used;
  const int64_t bytes = plan_pad(pad);
  // The lowering plans no copy for an operand whose base address alone is unaligned; kernels that
  // realign take it.
  if (add_sat(*used, bytes) > problem.padding_bytes) return false;
  *used += bytes;
  *operand = {pad->out, pad->out_ld, bytes / pad->element_bytes, pad->out_batch};
  return true;
}

SplitProblem split_of(const GemmProblem& problem, const Operand& operand, Major major,
                      int32_t extent_mn, bool is_pairs) {
  const GemmParams& params = problem.params;
  SplitProblem split = {};
  split.in = operand;
  split.major = major;
  split.count = problem.planes->count;
  split.rows = major == Major::kK ? extent_mn : params.k;
  split.columns = major == Major::kK ? params.k : extent_mn;
  split.pairs = is_pairs;
  if (is_pairs) split.rows /= 2;  // each row makes two, in either layout
  split.plane_k = static_cast<int32_t>(ceil_div(params.k, kPlaneTileK) * kPlaneTileK);
  split.batch_rank = params.batch_rank;
  std::copy(std::begin(params.batch_shape), std::end(params.batch_shape), split.batch_shape);
  return split;
}

}  // namespace

Status pad_unaligned_operands(GemmProblem* problem, const DeviceProperties& device, int64_t* used,
                              cudaStream_t stream) {
  // A padded copy of one of two weights would have other strides than the second weight.
  if (problem->padding_bytes == 0 || problem->params.epilogue.gated) return Status();
  GemmParams& params = problem->params;
  // TMA takes rows that end between multiples of 16 bytes; cp.async does not.
  const bool by_tma = device.compute_capability == 90 && params.batch_rank <= kMaxTmaBatchRank &&
                      arithmetic_of(problem->algorithm).wgmma;
  PadProblem pads[2];
  int count = 0;
  if (!(by_tma ? problem->strides_aligned_a : problem->aligned_a) &&
      plan_padding(*problem, problem->major_a, params.m, &params.a, &pads[count], used)) {
    problem->strides_aligned_a = problem->aligned_a = true;
    ++count;
  }
  if (!(by_tma ? problem->strides_aligned_b : problem->aligned_b) &&
      plan_padding(*problem, problem->major_b, params.n, &params.b, &pads[count], used)) {
    problem->strides_aligned_b = problem->aligned_b = true;
    ++count;
  }
  if (count == 0) return Status();
  JAX_TCGEMM_CUDA_CHECK(launch_pads(pads, count, stream), "padding ", count,
                        " operands of m=", params.m, " n=", params.n, " k=", params.k);
  return Status();
}

Status split_into_planes(GemmProblem* problem, int64_t* used, cudaStream_t stream) {
  GemmParams& params = problem->params;
  const PlaneProduct& product = *problem->planes;
  SplitProblem splits[2] = {
      split_of(*problem, params.a, problem->major_a, params.m, false),
      split_of(*problem, params.b, problem->major_b, params.n, params.pairs_of_b)};
  Operand* const operands[2] = {&params.a, &params.b};
  for (int i = 0; i < 2; ++i) {
    SplitProblem& split = splits[i];
    split.out = static_cast<char*>(problem->workspace) + *used;
    const int64_t bytes = plan_split(&split);
    *used = add_sat(*used, bytes);
    if (*used > problem->padding_bytes) break;  // an error, see below
    *operands[i] = {split.out, split.out_ld, bytes / 2, split.out_batch};
  }
  const int64_t state_at = *used;
  *used = add_sat(*used, kSplitStateBytes);
  JAX_TCGEMM_REQUIRE(*used <= problem->padding_bytes, product.name, " of m=", params.m,
                     " n=", params.n, " k=", params.k, " takes ", *used, " bytes for planes, not ",
                     problem->padding_bytes);
  void* const state = static_cast<char*>(problem->workspace) + state_at;
  problem->major_a = problem->major_b = Major::kK;
  params.pairs_of_b = false;
  problem->aligned_a = problem->aligned_b = true;
  problem->strides_aligned_a = problem->strides_aligned_b = true;
  const int32_t k_tiles = splits[0].plane_k / kPlaneTileK;
  params.planes = {product.count, product.order, k_tiles, static_cast<const PlaneScale*>(state)};
  const int64_t k = int64_t{product.products} * splits[0].plane_k;
  JAX_TCGEMM_REQUIRE(k <= std::numeric_limits<int32_t>::max(), product.name, " of k=", params.k);
  params.k = product.count * splits[0].plane_k;
  JAX_TCGEMM_CUDA_CHECK(launch_splits(splits, state, stream), "splitting operands of m=", params.m,
                        " n=", params.n, " into planes");
  return Status();
}

bool takes_planes(const GemmProblem& problem, const DeviceProperties& device) {
  if (device.compute_capability != 90 || problem.params.batch_rank > kMaxTmaBatchRank ||
      problem.params.k <= 0) {
    return false;
  }
  const ChoiceInput input = choice_input(problem, device, 0);
  const auto rows = kernel_registry();
  return std::any_of(rows.begin(), rows.end(), [&](const KernelEntry& row) {
    return row.config.planes && (input.run_time_rows || has_epilogue(row.built_config(), input));
  });
}

Status take_operands_as_they_are(GemmProblem* problem) {
  for (const KernelEntry& entry : kernel_registry()) {
    const KernelConfig& config = entry.config;
    if (config.arch != Arch::kSimt || config.pairs != problem->params.pairs_of_b ||
        arithmetic_of(config.algorithm).a != ElementType::kF32) {
      continue;
    }
    problem->algorithm = config.algorithm;
    problem->config = entry.name;
    problem->planes = nullptr;
    problem->padding_bytes = 0;
    return Status();
  }
  JAX_TCGEMM_REQUIRE(false, "no kernel for ", problem->planes->name);
}

}  // namespace jax_tcgemm
