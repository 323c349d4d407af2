"""C++ source of kernels that contain a program, and of other kernels compiled at run time."""

from __future__ import annotations

import hashlib

from jax_tcgemm.kernels import cpp
from jax_tcgemm.kernels import names as kernel_names

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


# The same for rows of mma.sync.
_OF_MMA_SYNC = """\
#include "mma_sync/function.cuh"
#include "mma_sync/layouts.h"
#include "sm80/kernel.cuh"

namespace jax_tcgemm {{
namespace {{

{program}
struct Row {{
  static constexpr KernelConfig kConfig{config};
}};
using Output = mma_sync::WarpFunction<Row::kConfig, Program>;
using Layout = mma_sync::Majors<Major::k{a}, Major::k{b}>;

}}  // namespace
}}  // namespace jax_tcgemm

extern "C" __global__ void __launch_bounds__(jax_tcgemm::Row::kConfig.threads(),
                                             jax_tcgemm::mma_sync::min_blocks(
                                                 jax_tcgemm::Row::kConfig))
    compiled_kernel(const __grid_constant__ jax_tcgemm::CompiledParams params,
                  const __grid_constant__ jax_tcgemm::mma_sync::Layouts) {{
  extern __shared__ __align__(128) char smem[];
  jax_tcgemm::sm80::Kernel<jax_tcgemm::Row::kConfig, jax_tcgemm::Output>::run(
      params, jax_tcgemm::ptx::shared_address(smem),
      [](auto&& use) {{ use(jax_tcgemm::Layout()); }});
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
        program: as ``program_source.of_program`` returns it; for ``PACKED`` and ``UNPACK``, the
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
    if config.arch != "sm90":
        return _OF_MMA_SYNC.format(program=program, config=cpp.config(config), **_majors(layout))
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
