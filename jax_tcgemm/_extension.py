"""Imports, checks and registers the compiled extension ``jax_tcgemm._core``."""

from __future__ import annotations

import functools
import pathlib

import jax

try:
    from jax_tcgemm import _core
except ImportError as error:
    raise ImportError(
        f"jax_tcgemm was imported from {pathlib.Path(__file__).parent}, whose compiled extension "
        f"cannot be loaded ({error}). In a clone of the repository, run `pip install .`; otherwise "
        "reinstall jax_tcgemm."
    ) from error

from jax_tcgemm.kernels import names as kernel_names
from jax_tcgemm.kernels import packed_configs
from jax_tcgemm.kernels import table as kernel_table
from jax_tcgemm.kernels.built import built_epilogue

GEMM_TARGET = "jax_tcgemm_gemm_v1"
RAGGED_DOT_TARGET = "jax_tcgemm_ragged_dot_v1"
COMPILED_TARGET = "jax_tcgemm_compiled_gemm_v4"
COMPILED_PASS_TARGET = "jax_tcgemm_compiled_pass_v2"
PACKED_TARGET = "jax_tcgemm_packed_v1"
PACKED_RAGGED_TARGET = "jax_tcgemm_packed_ragged_v1"
PACKED_FUNCTION_TARGET = "jax_tcgemm_packed_function_v1"
UNPACK_TARGET = "jax_tcgemm_unpack_v1"
TRANSPOSE_TARGET = "jax_tcgemm_transpose_v1"
PACK_TARGET = "jax_tcgemm_pack_v1"
OVERLAPPED_TARGET = "jax_tcgemm_overlapped_v2"
OVERLAPPED_FUNCTION_TARGET = "jax_tcgemm_overlapped_function_v1"
GATHERS_TARGET = "jax_tcgemm_gathers_v1"
# Only measurements use this target; no program of a user contains it.
MARK_TARGET = "jax_tcgemm_mark_v1"
TARGETS = (
    GEMM_TARGET,
    RAGGED_DOT_TARGET,
    COMPILED_TARGET,
    COMPILED_PASS_TARGET,
    PACKED_TARGET,
    PACKED_RAGGED_TARGET,
    PACKED_FUNCTION_TARGET,
    UNPACK_TARGET,
    TRANSPOSE_TARGET,
    PACK_TARGET,
    OVERLAPPED_TARGET,
    OVERLAPPED_FUNCTION_TARGET,
    GATHERS_TARGET,
)

# The most devices among which an overlapped product divides its rows.
MOST_PEERS: int = _core.MOST_PEERS

BUILT_TARGETS: frozenset[str] = frozenset(_core.registrations())
KERNEL_NAMES: frozenset[str] = frozenset(_core.kernel_names())


def check_kernel_names(built: frozenset[str], build_info: dict[str, str]) -> None:
    """Compares the kernels in the extension with the rows of the table.

    Raises:
        ImportError: the extension has a kernel that the table lacks, or a full build lacks a kernel
            of the table.
    """
    table = {config.name for config in kernel_table.CONFIGS}
    is_full_build = bool(build_info["cuda"]) and build_info["kernels_glob"] == "*"
    unknown = sorted(built - table)
    missing = sorted(table - built) if is_full_build else []
    if unknown or missing:
        raise ImportError(
            "jax_tcgemm's compiled extension and its kernel table differ: rebuild (pip install .). "
            f"Only in the extension: {unknown}; only in the table: {missing}."
        )


# How GPUs reach each other's memory: not at all, by PCIe, by NVLink.
NO_LINK, SLOW_LINK, NVLINK = _core.NO_LINK, _core.SLOW_LINK, _core.NVLINK


@functools.cache
def link_of(ordinals: tuple[int, ...]) -> int:
    """Returns the slowest link of two of these GPUs, given by their ordinals."""
    return _core.link_of(list(ordinals))


def is_built_for(capability: tuple[int, ...]) -> bool:
    """Checks if the kernels run on a GPU of this compute capability.

    Later GPUs compile the PTX of a build. Machine code runs on GPUs of the same major number. An
    architecture that ``CUDAARCHS`` gives by name (``native``, ``all``) counts as sufficient.
    """
    architectures = _core.build_info()["architectures"].split(",")
    for name, kind in (each.partition("-")[::2] for each in architectures):
        if not name[:2].isdigit():
            return True
        built = divmod(int("".join(filter(str.isdigit, name))), 10)
        if built <= tuple(capability) and (kind != "real" or built[0] == capability[0]):
            return True
    return False


def has_config(config: str | None) -> bool:
    """Checks if the row that ``config=`` names was compiled in."""
    return config is not None and kernel_names.read_config(config)[0] in KERNEL_NAMES


def has_row(name: str) -> bool:
    """Checks if the kernel of a row was compiled in, or is compiled at run time."""
    if name in packed_configs.BY_NAME:
        return PACKED_TARGET in BUILT_TARGETS
    row = kernel_names.find(name)
    return name in KERNEL_NAMES or (row is not None and row.arithmetic.at_run_time)


def has_kernel(
    algorithm: str,
    *,
    work: str = "none",
    gated: bool = False,
    grouped: str = "none",
    may_compile: bool = True,
) -> bool:
    """Checks if there is a kernel for such products in ``algorithm``.

    Fallback rows (``KernelConfig.is_fallback``) do not count, because XLA is faster.

    Args:
        algorithm: a row of the arithmetic table.
        work: how much the epilogue has to do; see ``GemmSpec.work``.
        gated: whether there are two weights.
        grouped: which dimension the groups divide; see ``KernelConfig``.
        may_compile: whether to count kernels that the build lacks.
    """
    rows = (row for row in kernel_names.for_algorithm(algorithm, grouped) if row.gated == gated)
    fast = (row for row in rows if row.name in KERNEL_NAMES and not row.is_fallback)
    return any(
        row.has_every(work) and (may_compile or built_epilogue(row) in (row.epilogue, work, "any"))
        for row in fast
    )


def has_plane_kernel(factors: str) -> bool:
    """Checks if a kernel that takes planes of float32 operands was compiled in.

    Args:
        factors: the row of the arithmetic table that multiplies planes.
    """
    rows = (row for row in kernel_table.CONFIGS if row.planes and row.algorithm == factors)
    return any(row.name in KERNEL_NAMES for row in rows)


def has_pairs_kernel(algorithm: str) -> bool:
    """Checks if a kernel that reads a B of complex numbers in place was compiled in.

    As in ``has_kernel``, fallback rows do not count.
    """
    rows = (row for row in kernel_table.CONFIGS if row.pairs and row.algorithm == algorithm)
    return any(row.name in KERNEL_NAMES and not row.is_fallback for row in rows)


def load() -> None:
    """Checks the extension and registers its custom calls; called once, on import."""
    check_kernel_names(KERNEL_NAMES, _core.build_info())
    for name, capsule in _core.registrations().items():
        jax.ffi.register_ffi_target(name, capsule, platform="CUDA", api_version=1)
