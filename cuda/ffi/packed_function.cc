// The custom call that multiplies by one or two packed weights and gives the products to a function
// compiled at run time. See dispatch/packed.h.
//
// Instantiate, once for each call of a program: compiles and loads the kernel.
// Execute: launches the kernel.

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string_view>

#include "common/status.h"
#include "dispatch/packed.h"
#include "ffi/attributes.h"
#include "ffi/compiled_operands.h"
#include "ffi/handlers.h"
#include "ffi/operands.h"
#include "ffi/packed_operands.h"

namespace jax_tcgemm {

// Set by jax_tcgemm/lowering/packed_function.py.
struct PackedFunctionAttributes {
  int64_t m, n, k, group, weights;
  bool has_zeros;
  int64_t tokens, row_blocks, k_blocks, stages, split_k, blocks_on_sm;
  std::string_view format, activation, scale;
  Strides operand_strides;  // (m, n), one operand after the other
  Strides operand_vectors;  // 1 if the kernel reads an operand by vectors
  Strides result_elements;
  std::string_view digest, source;
};

}  // namespace jax_tcgemm

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    ::jax_tcgemm::PackedFunctionAttributes, ::xla::ffi::StructMember<int64_t>("m"),
    ::xla::ffi::StructMember<int64_t>("n"), ::xla::ffi::StructMember<int64_t>("k"),
    ::xla::ffi::StructMember<int64_t>("group"), ::xla::ffi::StructMember<int64_t>("weights"),
    ::xla::ffi::StructMember<bool>("has_zeros"), ::xla::ffi::StructMember<int64_t>("tokens"),
    ::xla::ffi::StructMember<int64_t>("row_blocks"), ::xla::ffi::StructMember<int64_t>("k_blocks"),
    ::xla::ffi::StructMember<int64_t>("stages"), ::xla::ffi::StructMember<int64_t>("split_k"),
    ::xla::ffi::StructMember<int64_t>("blocks_on_sm"),
    ::xla::ffi::StructMember<std::string_view>("format"),
    ::xla::ffi::StructMember<std::string_view>("activation"),
    ::xla::ffi::StructMember<std::string_view>("scale"),
    ::xla::ffi::StructMember<::jax_tcgemm::Strides>("operand_strides"),
    ::xla::ffi::StructMember<::jax_tcgemm::Strides>("operand_vectors"),
    ::xla::ffi::StructMember<::jax_tcgemm::Strides>("result_elements"),
    ::xla::ffi::StructMember<std::string_view>("digest"),
    ::xla::ffi::StructMember<std::string_view>("source"));

namespace jax_tcgemm {
namespace {

// The same product without the function.
PackedAttributes product_of(const PackedFunctionAttributes& at) {
  return {1,
          at.m,
          at.n,
          at.k,
          at.group,
          at.has_zeros,
          false,
          at.tokens,
          at.row_blocks,
          at.k_blocks,
          at.stages,
          at.split_k,
          at.blocks_on_sm,
          at.format,
          at.activation,
          at.scale,
          "float32",
          at.digest};
}

Status use_of(const PackedFunctionAttributes& at, PackedUse* use) {
  JAX_TCGEMM_REQUIRE(at.weights == 1 || at.weights == 2, at.weights, " weights");
  *use = {false, static_cast<int>(at.weights)};
  return Status();
}

Status decode_and_run(const PackedFunctionAttributes& at, ffi::RemainingArgs& operands,
                      ffi::RemainingRets& results, cudaStream_t stream) {
  PackedUse use = {};
  JAX_TCGEMM_RETURN_IF_ERROR(use_of(at, &use));
  const auto own = static_cast<size_t>(1 + 2 * use.weights);
  JAX_TCGEMM_REQUIRE(operands.size() == own + at.operand_vectors.size(), operands.size(),
                     " operands, not ", own, " and those of the function");
  ffi::AnyBuffer buffers[] = {*operands.get<ffi::AnyBuffer>(0), *operands.get<ffi::AnyBuffer>(1),
                              *operands.get<ffi::AnyBuffer>(2)};
  const PackedAttributes product = product_of(at);
  PackedProblem problem = {};
  JAX_TCGEMM_RETURN_IF_ERROR(
      decode_packed(product, use, buffers[0], buffers[1], buffers[2], &problem));
  if (use.weights == 2) {
    const auto values = *operands.get<ffi::AnyBuffer>(3);
    const auto scales = *operands.get<ffi::AnyBuffer>(4);
    JAX_TCGEMM_RETURN_IF_ERROR(check_packed_weight(product, problem.config, values, scales));
    problem.params.values2 = static_cast<const uint8_t*>(values.untyped_data());
    problem.params.scales2 = static_cast<const uint8_t*>(scales.untyped_data());
  }
  JAX_TCGEMM_REQUIRE(at.source.find("kReductions = 0;") != std::string_view::npos &&
                         at.source.find("kBatched = false;") != std::string_view::npos,
                     "a function that is not of one matrix, or reduces it");
  CompiledParams function = {};
  const EpilogueOperands of_function = {
      at.m, at.n, {}, at.operand_strides, at.operand_vectors, at.result_elements, own,
      1,    1,    1,  at.source};
  JAX_TCGEMM_RETURN_IF_ERROR(decode_epilogue(of_function, operands, results, &function));
  problem.program = at.source;
  problem.function = &function;
  return run_packed(problem, stream);
}

ffi::Error packed_function(cudaStream_t stream, ffi::RemainingArgs operands,
                           ffi::RemainingRets results, PackedFunctionAttributes attributes) {
  return as_error(decode_and_run(attributes, operands, results, stream));
}

Status prepare(const PackedFunctionAttributes& at) {
  PackedUse use = {};
  JAX_TCGEMM_RETURN_IF_ERROR(use_of(at, &use));
  PackedConfig config = {};
  JAX_TCGEMM_RETURN_IF_ERROR(decode_packed_config(product_of(at), use, &config));
  return prepare_packed(config, at.digest, at.source);
}

// XLA may pass buffers without addresses, or none.
ffi::Error instantiate_packed_function(ffi::RemainingArgs, ffi::RemainingRets,
                                       PackedFunctionAttributes attributes) {
  return as_error(prepare(attributes));
}

// Capturable into a CUDA graph: the handler only enqueues a kernel.
XLA_FFI_DEFINE_HANDLER(kPackedFunctionHandler, packed_function,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs<PackedFunctionAttributes>(),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(
    kInstantiateHandler, instantiate_packed_function,
    ffi::Ffi::BindInstantiate().RemainingArgs().RemainingRets().Attrs<PackedFunctionAttributes>());

}  // namespace

Target packed_function_target() {
  return {"jax_tcgemm_packed_function_v1", kPackedFunctionHandler, kInstantiateHandler};
}

}  // namespace jax_tcgemm
