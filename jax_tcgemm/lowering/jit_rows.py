"""Rows that NVRTC may compile for a product with a function, ranked by the time model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jax_tcgemm import _compat, _core
from jax_tcgemm.epilogue import compiler, nvrtc, source
from jax_tcgemm.epilogue.spec import CompiledSpec
from jax_tcgemm.kernels.arithmetic import ALL_ARITHMETIC
from jax_tcgemm.kernels.choice_input import ChoiceInput
from jax_tcgemm.kernels.names import by_name, read_config
from jax_tcgemm.lowering import devices
from jax_tcgemm.lowering.jit_call import Call
from jax_tcgemm.lowering.jit_source import result_bytes
from jax_tcgemm.problem.alignment import row_alignment


def begin_compiling(call: Call, spec: CompiledSpec) -> None:
    """Starts to compile, on another thread, the kernel that lowering will most likely need.

    On GPUs other than Hopper's, that is the kernel of a measured row, which is not known here.
    """
    if devices.other_than(devices.HOPPER) is not None:
        return
    expected = expected_row(call, spec)
    if expected is not None and not isinstance(nvrtc.find(), str):
        compiler.begin(call.source, *expected)


def expected_row(call: Call, spec: CompiledSpec) -> tuple[str, str] | None:
    """Returns the row and layout that will be compiled first.

    ``None`` without a GPU, or if no row has room for the function.
    """
    row = first_row(call, spec)
    if row is None:
        return None
    name, splits = read_config(row)
    # As layout_name of cuda/dispatch/compiled.cc.
    is_swapped = by_name(name).skinny and call.gemm.m < call.gemm.n
    row = name + source.ADDS_PARTS * (splits > 1)
    return row, source.swapped(call.layout) if is_swapped else call.layout


def first_row(call: Call, spec: CompiledSpec) -> str | None:
    """Returns the row, with the parts of k, that comes first in ``ranked_rows`` on the local GPU.

    ``None`` without a GPU, or if no row has room for the function.
    """
    gpus = _compat.initialized_cuda_devices()
    if not gpus:
        return None
    ranked = ranked_rows(call, spec, _core.device_properties(gpus[0].local_hardware_id))
    return ranked[0][0] if ranked else None


def ranked_rows(
    call: Call, spec: CompiledSpec, device: Mapping[str, Any]
) -> list[tuple[str, float, bool]]:
    """Returns rows and their modeled times, fastest first, as ``_core.rank_configs`` does.

    If the row that ``spec`` names can compute the product, it is the only one. Rows without room
    for the data that the epilogue reads and writes are left out if others have room. The groups of
    ``ragged_dot`` are assumed to be of one size, at least one row.

    Args:
        call: the product as a kernel sees it.
        spec: its static parameters.
        device: the result of ``_core.device_properties``.
    """
    gemm = call.gemm
    is_grouped = spec.is_grouped
    itemsize = ALL_ARITHMETIC[call.algorithm].a.bytes
    choice = ChoiceInput(
        call.algorithm,
        -(-gemm.m // gemm.batch[0]) if is_grouped else gemm.m,
        gemm.n,
        gemm.k,
        min(gemm.m, gemm.batch[0]) if is_grouped else math.prod(gemm.batch),
        True,
        device["sm_count"],
        device["shared_memory_per_block"],
        compute_capability=device["compute_capability"],
        layout=call.layout,
        workspace_bytes=call.workspace_bytes,
        epilogue="any",
        gated=spec.is_gated,
        grouped=spec.product.grouped,
        batch_rank=len(gemm.batch),
        row_alignment_a=row_alignment(gemm, "a", itemsize),
        row_alignment_b=row_alignment(gemm, "b", itemsize),
        compiled=True,
        reduces=call.reduces,
        shows_sums=call.shows_sums,
    )
    return _core.rank_configs(
        choice,
        warp_bytes=call.warp_bytes,
        result_bytes=result_bytes(call.program),
        config=spec.product.config or "",
    )
