"""Reasons why no kernel computes a product, or none is as fast as XLA."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from jax_tcgemm import _core, _extension
from jax_tcgemm.kernels import names as kernel_names
from jax_tcgemm.kernels.arithmetic import ARITHMETIC
from jax_tcgemm.lowering import devices
from jax_tcgemm.lowering.custom_call import (
    MAX_BATCH_NDIM,
    second_weight_offset,
    shapes_of,
)
from jax_tcgemm.lowering.fallback.times import why_slower
from jax_tcgemm.problem.alignment import COPY_BYTES, misalignment
from jax_tcgemm.problem.arithmetic import (
    INPUT_DTYPES,
    resolve_planes,
    sum_dtype,
    written_dtype,
)
from jax_tcgemm.problem.spec import GemmSpec, with_kernel_layouts
from jax_tcgemm.problem.strides import MAX_EXTENT, Operands, fold


def no_kernel(algorithm: str | None, spec: GemmSpec, x: Operands) -> str | None:
    """Returns why no kernel can be used, or ``None`` if one can.

    Args:
        algorithm: the kernel algorithm, ``None`` if there is none.
        spec: the primitive's parameters.
        x: the operands.
    """
    reason = _no_kernel(algorithm, spec, x)
    if algorithm is None or reason is not None or not spec.is_gated:
        return reason
    return no_gated_kernel(algorithm, spec, x)


def _no_kernel(algorithm: str | None, spec: GemmSpec, x: Operands) -> str | None:
    if algorithm is None:
        planes = resolve_planes(x.a.dtype, x.b.dtype, spec.out_dtype, spec.precision)
        if planes is not None:
            return (
                f"{planes.name} without a GPU of compute capability 9.0 on this machine, for "
                f"precision {spec.precision}"
            )
        return (
            f"no kernel algorithm for {x.a.dtype} and {x.b.dtype} to {spec.out_dtype} "
            f"with precision {spec.precision}"
        )
    if spec.config == kernel_names.XLA:
        return "by config"
    named = _extension.has_config(spec.config)
    if not (named or devices.has_kernel(algorithm, work=spec.work, gated=spec.is_gated)):
        kind = " gated" if spec.is_gated else "" if spec.work == "none" else " fused"
        return f"no{kind} kernel for {algorithm} in this build"
    if spec.epilogue.is_derivative and sum_dtype(algorithm) != jnp.float32:
        return f"no kernel for the {spec.epilogue.form} epilogue in {algorithm}"
    return odd_operands(spec, x) or devices.too_old_for(ARITHMETIC[algorithm])


def odd_operands(spec: GemmSpec, x: Operands) -> str | None:
    """Returns what kernels cannot count or address in these operands, or ``None``."""
    if spec.axes.c2 is not None and spec.axes.c2 != spec.axes.c:
        return "c and c2 lie differently"
    if not all(isinstance(extent, int) for extent in (*x.a.shape, *x.b.shape)):
        return "symbolic shapes"
    if max((*x.a.shape, *x.b.shape)) > MAX_EXTENT:
        return "an extent beyond 2^30"
    return "a batch beyond 2^30" if _matrices(spec, x) > MAX_EXTENT else None


def _matrices(spec: GemmSpec, x: Operands) -> int:
    """Returns the most matrices that the batch of the custom call can have."""
    shapes = shapes_of(x)
    gemm = spec.strided(shapes)
    folded = fold(gemm)
    # Operands that are copied first (`_laid_out`) may fold less, because their rows no longer fold.
    stay = with_kernel_layouts(spec, shapes)[0] == spec and len(folded.batch) <= MAX_BATCH_NDIM
    return math.prod((folded if stay else gemm).batch)


def slower_than_xla(algorithm: str, spec: GemmSpec, x: Operands) -> str | None:
    """Returns why XLA is expected to be faster, if nothing was measured.

    Args:
        algorithm: the kernel algorithm.
        spec: the primitive's parameters.
        x: the operands, which a kernel could read.
    """
    if spec.is_gated or spec.config is not None:
        return None
    # The kernels were fitted to Hopper. Without tuning, their speed for a plain product on other
    # GPUs is unknown.
    other = devices.other_than(devices.HOPPER)
    if other is not None and spec.work == "none":
        return f"a product on {other} that was not tuned"
    shapes = shapes_of(x)
    if with_kernel_layouts(spec, shapes)[0] != spec:
        return None
    beside = x._replace(a=None, b=None, alpha=None)
    is_plain = not (any(operand is not None for operand in beside) or spec.activation)
    gemm = fold(spec.strided(shapes))
    return why_slower(
        algorithm,
        gemm,
        spec.out_dtype.itemsize,
        is_plain=is_plain,
        has_factor=spec.work != "none",
    )


def no_gated_kernel(algorithm: str, spec: GemmSpec, x: Operands) -> str | None:
    """Returns why no gated kernel can be used although an ordinary one could, or ``None``.

    Without a local GPU, the program may run on a GPU that has only slow kernels. If such a GPU is
    local, XLA is faster, and the slow kernels must be requested by name.
    """
    if not spec.packed and spec.axes.b2 != spec.axes.b:
        return "the two weights lie differently"
    gemm = fold(spec.strided(shapes_of(x)))
    if gemm.k == 0:
        return "nothing to multiply"
    row = kernel_names.find(spec.config or "")
    takes_any = row is not None and row.is_fallback
    if len(gemm.batch) > (MAX_BATCH_NDIM if takes_any else _core.MAX_TMA_BATCH_RANK):
        return f"{len(gemm.batch)} batch dimensions that do not fold"
    if with_kernel_layouts(spec, shapes_of(x))[0] != spec:
        return "an operand without a contiguous axis"
    if takes_any:
        return None
    other = devices.other_than(devices.HOPPER)
    if other is not None:
        return f"no gated kernel for {other}"
    itemsize = INPUT_DTYPES[algorithm].itemsize
    for name in ("a", "b"):
        what = misalignment(gemm, name, itemsize)
        if what is not None:
            return f"{name} has {what}, unaligned"
    if second_weight_offset(gemm, spec) * itemsize % COPY_BYTES:
        return "the second weight's columns begin unaligned"
    return None


def no_ragged_kernel(algorithm: str | None, spec: GemmSpec, extents: tuple[Any, ...]) -> str | None:
    """Returns why no kernel can be used, or ``None``; slow kernels must be requested by name."""
    config, grouped = spec.config, spec.grouped
    work = spec.work
    if work != "none" and algorithm is not None:
        # Built rows add vectors in the narrower type of a result alone.
        is_wide = written_dtype(algorithm, spec.out_dtype) != INPUT_DTYPES[algorithm]
        work = "any" if is_wide else work
    if config == kernel_names.XLA:
        return "by config"
    if algorithm is None or not kernel_names.for_algorithm(algorithm, grouped):
        return f"no ragged kernel for {algorithm}"
    named = config in _extension.KERNEL_NAMES
    if not (named or devices.has_kernel(algorithm, work=work, grouped=grouped)):
        return f"no ragged kernel for {algorithm} in this build"
    if not all(isinstance(extent, int) for extent in extents):
        return "symbolic shapes"
    if not all(0 < extent <= MAX_EXTENT for extent in extents):
        return "nothing to multiply, or an extent beyond 2^30"
    row = kernel_names.find(config or "")
    if row is not None and row.is_fallback:
        return None
    other = devices.other_than(devices.HOPPER)
    return None if other is None else f"no ragged kernel for {other}"
