"""C++ source of programs, and of kernels that contain a program."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import jax.numpy as jnp

from jax_tcgemm.epilogue.operations import element
from jax_tcgemm.epilogue.program import Program
from jax_tcgemm.kernels import cpp
from jax_tcgemm.kernels import names as kernel_names


def of_program(
    program: Program,
    kinds: Sequence[tuple[str, bool]],
    by_vectors: Sequence[bool],
    *,
    batched: bool,
    scaled: bool = False,
) -> str:
    """Returns the C++ of a program; ``cuda/sm90/output/compiled.cuh`` describes it.

    Args:
        program: the epilogue.
        kinds: for each leaf, the dimensions along which it varies, as ``Along`` names them, and
            whether it is read by vectors.
        by_vectors: for each result, whether it is written by vectors.
        batched: whether there is more than one matrix.
        scaled: whether the factors have block scales.
    """
    loads, types = [], []
    for number, (leaf, (along, is_vector)) in enumerate(zip(program.leaves, kinds, strict=True)):
        kind = element(leaf.dtype).cpp
        loads.append(f"    const auto x{number} = io.template {_LOADS[along]}<{kind}, {number}>();")
        size = jnp.dtype(leaf.dtype).itemsize
        types.append(f"{{Along::{along}, {size}, {str(is_vector).lower()}}}")
    results = [
        f"{{{jnp.dtype(result.dtype).itemsize}, {str(is_vector).lower()}}}"
        for result, is_vector in zip(program.matrices, by_vectors, strict=True)
    ]
    kinds_of = [element(each.dtype).cpp for each in program.outputs]
    declared = [f"    ValueOf<{kind}> r{i}[kValues];" for i, kind in enumerate(kinds_of)]
    values = (*program.written, *(each.value for each in program.reductions))
    stored = [f"      r{i}[i] = {value};" for i, value in enumerate(values)]
    count = len(results)
    writes = [f"    io.template write<{kinds_of[i]}, {i}>(r{i});" for i in range(count)]
    reductions = [
        (f"<{kinds_of[i]}, {i}, Along::{each.along}, {each.join}>", i, each.neutral)
        for i, each in enumerate(program.reductions, count)
    ]
    writes += [f"    io.template reduce{which}(r{i}, {zero});" for which, i, zero in reductions]
    visits = [f"    visitor.template reduction{which}({zero});" for which, _, zero in reductions]
    return _PROGRAM.format(
        batched=str(batched).lower(),
        scaled=str(scaled).lower(),
        operands=len(types),
        operand_kinds=", ".join(types) or "{Along::kNothing, 4, false}",
        results=len(results),
        result_kinds=", ".join(results) or "{4, false}",
        reductions=len(reductions),
        shows_sums=str(program.shows_sums).lower(),
        visits="\n".join(visits),
        loads="\n".join([*loads, *declared]),
        lines="\n".join([*(f"      {line}" for line in program.lines), *stored]),
        writes="\n".join(writes),
    )


_LOADS: Mapping[str, str] = {
    "kNothing": "scalar",
    "kRows": "rows",
    "kColumns": "columns",
    "kMatrix": "matrix",
}

_PROGRAM = """\
struct Program {{
  static constexpr bool kBatched = {batched};
  static constexpr bool kBlockScales = {scaled};
  static constexpr int kOperands = {operands};
  static constexpr CompiledOperandKind kOperand[] = {{{operand_kinds}}};
  static constexpr int kResults = {results};
  static constexpr CompiledResultKind kResult[] = {{{result_kinds}}};
  static constexpr int kReductions = {reductions};
  static constexpr bool kShowsSums = {shows_sums};

  template <typename Visitor>
  static __device__ __forceinline__ void each_reduction(const Visitor& visitor) {{
{visits}
  }}
  template <typename Io>
  static __device__ __forceinline__ void run(const Io& io) {{
    constexpr int kValues = Io::kValues;
{loads}
#pragma unroll
    for (int i = 0; i < kValues; ++i) {{
{lines}
    }}
{writes}
  }}
}};
"""


# The kernel's name is kKernelName of cuda/dispatch/run_time_kernel.cc.
_SOURCE = """\
#include "sm90/output/compiled.cuh"
{includes}
namespace jax_tcgemm {{
namespace {{

{program}
struct OfParts : Program {{
  static constexpr bool kAddsParts = true;
}};
struct Row {{
  static constexpr KernelConfig kConfig{config};
}};
using Layouts = sm90::LayoutSet<sm90::Layout<Major::k{a}, Major::k{b}>>;
using Kernel = sm90::{kernel};

}}  // namespace
}}  // namespace jax_tcgemm

extern "C" __global__ void {cluster}__launch_bounds__(jax_tcgemm::Row::kConfig.threads(),
                                             jax_tcgemm::Row::kConfig.blocks_on_sm())
    compiled_kernel(const __grid_constant__ jax_tcgemm::CompiledParams params,
                  const __grid_constant__ jax_tcgemm::sm90::TensorMaps maps) {{
  extern __shared__ __align__(1024) char smem[];
  jax_tcgemm::Kernel::run(params, maps, {{jax_tcgemm::ptx::shared_address(smem)}});
}}
"""


_PASS_SOURCE = """\
#include "passes/compiled_pass.cuh"

namespace jax_tcgemm {{
namespace {{

{program}
}}  // namespace
}}  // namespace jax_tcgemm

extern "C" __global__ void __launch_bounds__(jax_tcgemm::kPassThreads, 4)
    compiled_kernel(const __grid_constant__ jax_tcgemm::CompiledParams params) {{
  jax_tcgemm::CompiledPass<jax_tcgemm::Program>::run(params);
}}
"""

# Replaces the name of a row if the program runs alone, in a pass over its operands. The same as
# kPass of cuda/dispatch/program_library.cc.
PASS = "pass"

_PACKED_SOURCE = """\
#include "sm90/packed/kernel.cuh"

namespace jax_tcgemm {{

struct Row {{
  static constexpr PackedConfig kConfig{program};
}};

}}  // namespace jax_tcgemm

extern "C" __global__ void __cluster_dims__(jax_tcgemm::Row::kConfig.split_k, 1, 1)
    __launch_bounds__(jax_tcgemm::Row::kConfig.threads(), jax_tcgemm::Row::kConfig.blocks_on_sm)
    compiled_kernel(const __grid_constant__ jax_tcgemm::PackedParams params,
                  const __grid_constant__ jax_tcgemm::sm90::TensorMap x) {{
  extern __shared__ __align__(1024) char smem[];
  jax_tcgemm::sm90::run_packed<jax_tcgemm::Row::kConfig>(params, x,
                                                        jax_tcgemm::ptx::shared_address(smem));
}}
"""

_PACKED_FUNCTION_SOURCE = """\
#include "sm90/packed/function_io.cuh"
#include "sm90/packed/kernel.cuh"

namespace jax_tcgemm {{
namespace {{

{function}
struct Row {{
  static constexpr PackedConfig kConfig{config};
}};

}}  // namespace
}}  // namespace jax_tcgemm

extern "C" __global__ void __cluster_dims__(jax_tcgemm::Row::kConfig.split_k, 1, 1)
    __launch_bounds__(jax_tcgemm::Row::kConfig.threads(), jax_tcgemm::Row::kConfig.blocks_on_sm)
    compiled_kernel(const __grid_constant__ jax_tcgemm::PackedParams params,
                  const __grid_constant__ jax_tcgemm::sm90::TensorMap x,
                  const __grid_constant__ jax_tcgemm::CompiledParams function) {{
  extern __shared__ __align__(1024) char smem[];
  jax_tcgemm::sm90::run_packed<jax_tcgemm::Row::kConfig, jax_tcgemm::Program>(
      params, x, jax_tcgemm::ptx::shared_address(smem), &function);
}}
"""

_UNPACK_SOURCE = """\
#include "sm90/packed/unpack.cuh"

namespace jax_tcgemm {{

struct Row {{
  static constexpr PackedConfig kConfig{program};
}};

}}  // namespace jax_tcgemm

extern "C" __global__ void __launch_bounds__(jax_tcgemm::kUnpackThreads)
    compiled_kernel(const __grid_constant__ jax_tcgemm::UnpackParams params) {{
  using Kernel = jax_tcgemm::sm90::Unpack<jax_tcgemm::Row::kConfig>;
  __shared__ __align__(16) uint16_t rows[jax_tcgemm::kPackedTile][Kernel::kPitch];
  Kernel{{params, rows}}.run();
}}
"""

# Replaces the name of a row for a kernel for packed weights; ``program`` is its ``PackedConfig``.
# The same as kPackedLayout of cuda/dispatch/program_library.h.
PACKED = "packed"
# The same if a function gets the products; ``program`` is the ``PackedConfig``, a line of its own,
# and then the function. kPackedFunctionLayout.
PACKED_FUNCTION = "packed_function"
# The same for the pass that dequantizes a packed weight; kUnpackLayout.
UNPACK = "unpack"
_ALONE = {PASS: _PASS_SOURCE, PACKED: _PACKED_SOURCE, UNPACK: _UNPACK_SOURCE}

_KERNEL = "Kernel<Row::kConfig, {swap_ab}, Layouts, {program}>"
# Follows the name of a row whose blocks add up parts of k; the same as kAddsParts of
# cuda/dispatch/program_library.cc.
ADDS_PARTS = "/parts"
_OF_8_BITS = """\
#include "ptx/run_time_wgmma.cuh"
#include "sm90/scaled_mainloop.cuh"
"""
_STREAMED_KERNEL = "StreamedKernel<Row::kConfig, Program>"
_STREAMED = """\
#include "sm90/streamed_kernel.cuh"
"""
_SKINNY_KERNEL = """\
SkinnyKernel<Row::kConfig, Layouts, sm90::SkinnyFunction<Row::kConfig, Program>, CompiledParams>"""
_SKINNY = """\
#include "sm90/output/skinny_function.cuh"
#include "sm90/skinny_kernel.cuh"
"""
_SKINNY_CLUSTER = "__cluster_dims__(jax_tcgemm::Row::kConfig.cluster_size(), 1, 1) "


def of_kernel(program: str, row: str, layout: str) -> str:
    """Returns the source that is compiled for a row of the kernel table.

    Args:
        program: as ``of_program`` returns it; for ``PACKED`` and ``UNPACK``, the
            initialiser of a configuration; for ``PACKED_FUNCTION``, both.
        row: the row's name, which ``ADDS_PARTS`` may follow, ``PASS``, ``PACKED``,
            ``PACKED_FUNCTION`` or ``UNPACK``.
        layout: ``"n"`` or ``"t"`` for each of ``a`` and ``b``; for a skinny row, of the operands
            that the kernel calls A and B.
    """
    if row == PACKED_FUNCTION:
        packed, function = program.split("\n", 1)
        return _PACKED_FUNCTION_SOURCE.format(config=packed, function=function)
    if row in _ALONE:
        return _ALONE[row].format(program=program)
    config = kernel_names.by_name(row.removesuffix(ADDS_PARTS))
    of_8_bits = _OF_8_BITS if config.arithmetic.at_run_time else ""
    # As swaps_operands of cuda/sm90/output/output_tile.h.
    swap_ab = config.swap_ab or (config.element_bytes == 4 and layout == "nn")
    if swap_ab:
        layout = swapped(layout)
    name = "OfParts" if row.endswith(ADDS_PARTS) else "Program"
    kernel = _KERNEL.format(swap_ab=str(swap_ab).lower(), program=name)
    includes, cluster = of_8_bits, ""
    if config.streams_b:
        includes, kernel = _STREAMED, _STREAMED_KERNEL
    elif config.skinny:
        includes, kernel, cluster = of_8_bits + _SKINNY, _SKINNY_KERNEL, _SKINNY_CLUSTER
    return _SOURCE.format(
        program=program,
        includes=includes,
        kernel=kernel,
        cluster=cluster,
        config=cpp.config(config),
        **_majors(layout),
    )


def swapped(layout: str) -> str:
    """Returns the layouts of B^T and A^T, which a kernel of swapped operands calls A and B."""
    return "".join("n" if each == "t" else "t" for each in reversed(layout))


# The header contains the kernel.
_ROW_SOURCE = """\
{known}#include "kernel_config.h"

namespace jax_tcgemm {{

struct Row {{
  static constexpr KernelConfig kConfig{config};
}};
constexpr Major kMajorA = Major::k{a}, kMajorB = Major::k{b};

}}  // namespace jax_tcgemm

#include "{family}/run_time_row.cuh"
"""


def of_row(known: str, row: str, layout: str) -> str:
    """Returns the source for a row of the kernel table with the package's epilogues.

    Args:
        known: definitions of the known facts about the epilogue.
        row: the row's name.
        layout: ``"n"`` or ``"t"`` for each of the operands that the kernel calls A and B.
    """
    config = kernel_names.by_name(row)
    return _ROW_SOURCE.format(
        known=known, config=cpp.config(config), family=config.arch, **_majors(layout)
    )


def _majors(layout: str) -> dict[str, str]:
    return {"a": "Mn" if layout[0] == "t" else "K", "b": "K" if layout[1] == "t" else "Mn"}


def digest(text: str) -> str:
    """Returns the digest that identifies a program."""
    return hashlib.sha256(text.encode()).hexdigest()
