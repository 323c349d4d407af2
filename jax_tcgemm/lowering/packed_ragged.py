"""Lowering of groups of rows that have a packed weight each: the reference, and CUDA."""

from __future__ import annotations

import jax
import numpy as np

from jax_tcgemm import _compat, _core, _extension
from jax_tcgemm.kernels import packed as kernels
from jax_tcgemm.kernels.names import XLA
from jax_tcgemm.lowering import fallback, packed, packed_layout, packed_problem, ragged_reference
from jax_tcgemm.lowering.ragged import cuda_ragged
from jax_tcgemm.problem import ragged
from jax_tcgemm.problem.log import log
from jax_tcgemm.problem.packed import PackedSpec
from jax_tcgemm.problem.spec import GemmSpec


def of_dequantized(spec: PackedSpec, *, transpose_rhs: bool = False) -> GemmSpec:
    """Returns the description of the product with the dequantized weights.

    Args:
        spec: the parameters of the product with packed weights.
        transpose_rhs: whether the dequantized weights are ``(g, n, k)``.
    """
    config = spec.config if spec.config == "xla" else None
    precision = _compat.canonicalize_precision(None)
    return ragged.dot(spec.out_dtype, precision, config, transpose_b=transpose_rhs)


def reference(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    group_sizes: jax.Array,
    *,
    spec: PackedSpec,
) -> list[jax.Array]:
    """Multiplies groups of rows by one dequantized weight each.

    Args:
        x: ``(m, k)``, floating-point numbers.
        values: ``(g, ceil(n / 64), ceil(k / 64), 128, bytes)``.
        scales: ``(g, ceil(n / 64), groups, c, 64)``.
        group_sizes: ``(g,)``, int32.
        spec: the primitive's parameters.

    Returns:
        One array ``(m, n)`` of ``spec.out_dtype``. Rows behind all groups are zero.
    """
    w = packed_layout.dequantized(values, scales, spec, x.dtype)
    return ragged_reference.reference_dot(x, w, group_sizes, spec=of_dequantized(spec))


def lower_cuda(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    group_sizes: jax.Array,
    *,
    spec: PackedSpec,
) -> list[jax.Array]:
    """Computes the products on CUDA devices; operands and results are those of ``reference``.

    With few rows a group, one kernel reads the packed weights of the groups that have rows. With
    many rows, another kernel dequantizes all weights first.
    """
    groups = values.shape[0]
    call = f"tcgemm_packed_ragged {spec.qtype} {x.dtype}{list(x.shape)} n={spec.n} g={groups}"
    reason, told = packed.unfit(x, values, scales, spec), ""
    if reason is None:
        operands = (x, values, scales, group_sizes)
        config, told = packed_problem.measured_config(
            packed_problem.RAGGED, operands, spec, len(x), experts=groups
        )
        if config == XLA:
            reason = packed.MEASURED
        else:
            found = _few_rows(x, values, scales, spec, config)
            if isinstance(found, packed.Call):
                log(f"{call}: config {found.config}{told}")
                return [found.emit(x, values, scales, group_sizes)]
            w = packed.dequantized(values, scales, spec, x.dtype)
            if not isinstance(w, str):
                log(f"{call}: dequantized by a kernel: {found}{told}")
                return cuda_ragged(x, w, group_sizes, spec=of_dequantized(spec, transpose_rhs=True))
            reason = w
    strict = fallback.is_strict(spec.config) and reason != packed.EMPTY
    fallback.report(call, reason + told, strict=strict)
    return reference(x, values, scales, group_sizes, spec=spec)


def _few_rows(
    x: jax.Array, values: jax.Array, scales: jax.Array, spec: PackedSpec, config: str | None
) -> packed.Call | str:
    """Returns the custom call for few rows a group, or why there is none."""
    (m, k), experts = x.shape, len(values)
    untuned = kernels.choose_ragged(spec.bits, (m, spec.n, k), spec.group, experts)
    row = packed.row_of(config, spec, untuned, f"{m} rows of {experts} groups")
    if isinstance(row, str):
        return row
    if m // row.tokens + min(m, experts + 1) > _core.MAX_GRID_ROWS:
        return f"too many tiles of {m} rows in {experts} groups"
    program = packed.program_of(row, np.dtype(x.dtype), scales.dtype, spec, ragged=True)
    if isinstance(program, packed.NoProgram):
        return program.reason
    target = _extension.PACKED_RAGGED_TARGET
    return packed.Call(spec, row, (experts, m), True, program, target)
