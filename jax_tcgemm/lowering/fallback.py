"""Reasons for a fallback to XLA: no kernel can compute a product, or none is as fast."""

from __future__ import annotations

import contextlib
import contextvars
import math
import os
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_tcgemm import _extension
from jax_tcgemm.kernels import names as kernel_names
from jax_tcgemm.kernels.arithmetic import ARITHMETIC, PlaneProduct
from jax_tcgemm.lowering import devices
from jax_tcgemm.lowering.custom_call import (
    MAX_BATCH_NDIM,
    MAX_TMA_BATCH_NDIM,
    second_weight_offset,
    shapes_of,
)
from jax_tcgemm.lowering.slower_kernels import why_slower
from jax_tcgemm.problem.alignment import COPY_BYTES, misalignment
from jax_tcgemm.problem.arithmetic import INPUT_DTYPES, resolve_planes, sum_dtype
from jax_tcgemm.problem.log import log
from jax_tcgemm.problem.spec import GemmSpec, with_kernel_layouts
from jax_tcgemm.problem.strides import MAX_EXTENT, Operands, fold

# ``1``: lowering raises an error instead of a fallback.
SETTING = "JAX_TCGEMM_STRICT"


class FallbackError(ValueError):
    """No kernel computes what ``config="kernel"`` or ``JAX_TCGEMM_STRICT=1`` asks for."""


def is_strict(config: str | None) -> bool:
    """Checks if a call forbids a fallback to XLA.

    Args:
        config: the configuration that the call requests.
    """
    if config == kernel_names.XLA or _lenient.get():
        return False
    return config == kernel_names.KERNEL or os.environ.get(SETTING) == "1"


_lenient = contextvars.ContextVar("lenient", default=False)


@contextlib.contextmanager
def lenient() -> Iterator[None]:
    """Within this context no call is strict: measurements, and parts of what XLA divides."""
    token = _lenient.set(True)
    try:
        yield
    finally:
        _lenient.reset(token)


def report(call: str, reason: str, *, strict: bool) -> None:
    """Logs that XLA computes a call, and why.

    Raises:
        FallbackError: ``strict`` forbids the fallback.
    """
    if strict:
        raise FallbackError(
            f"{call}: no kernel computes this: {reason}; without config={kernel_names.KERNEL!r} "
            f"and {SETTING}=1 XLA does"
        )
    log(f"{call}: fallback to XLA: {reason}")


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
    if spec.axes.c2 is not None and spec.axes.c2 != spec.axes.c:
        return "c and c2 lie differently"
    shape = odd_shape(spec, x)
    if shape is not None:
        return shape
    return devices.too_old_for(ARITHMETIC[algorithm])


def odd_shape(spec: GemmSpec, x: Operands) -> str | None:
    """Returns what kernels cannot count in these shapes, or ``None``."""
    if not all(isinstance(extent, int) for extent in (*x.a.shape, *x.b.shape)):
        return "symbolic shapes"
    if max((*x.a.shape, *x.b.shape)) > MAX_EXTENT:
        return "an extent beyond 2^30"
    return "a batch beyond 2^30" if _matrices(spec, x) > MAX_EXTENT else None


# Complex products take less time than XLA's own from this many multiplications per matrix of the
# batch on, and from this many rows, columns and k on. Measured on an H200 (docs/performance.md).
_PAIR_PRODUCTS = 2**29
_PAIR_ROWS = 256

# Products of planes take less time than XLA's own product from these numbers per matrix of the
# batch on: multiplications, results, rows or columns, and k. Measured on an H200
# (docs/performance.md). With fewer results XLA adds up parts of k, in less time and with less
# error.
_PLANE_PRODUCTS = 2**28
_PLANE_RESULTS = 2**18
_PLANE_ROWS = 256
_PLANE_K = 256
# XLA adds up parts of k if there are fewer results than this. If k is also longer than this, XLA is
# more accurate than float32 sums over all k-tiles (docs/experiments/precision.md).
_RESULTS_IN_PARTS = 2**20
_K_IN_PARTS = {
    "BF16_BF16_F32_X6": 4096,
    "TF32_TF32_F32_X3": 4096,
    "F32_F32_F32": 16384,
}


def possible_planes(a: np.dtype, b: np.dtype, out: np.dtype, precision: Any) -> PlaneProduct | None:
    """Returns ``resolve_planes(...)`` if there are local GPUs and all have the kernels."""
    return resolve_planes(a, b, out, precision) if devices.are_all(devices.HOPPER) else None


def no_planes(
    planes: PlaneProduct, spec: GemmSpec, x: Operands, *, strict: bool = False
) -> str | None:
    """Returns why float32 operands are not multiplied by their planes, or ``None``.

    Args:
        planes: the products that would be added up.
        spec: the primitive's parameters.
        x: the operands.
        strict: whether a kernel is to compute what XLA computes in less time, too.
    """
    if spec.config == kernel_names.XLA:
        return "by config"
    if not _extension.has_plane_kernel(planes.factors):
        return f"no kernel for {planes.name} in this build"
    if spec.is_gated:
        return f"no gated kernel for {planes.name}"
    if spec.axes.c2 is not None and spec.axes.c2 != spec.axes.c:
        return "c and c2 lie differently"
    shape = odd_shape(spec, x)
    if shape is not None:
        return shape
    if with_kernel_layouts(spec, shapes_of(x))[0] != spec:
        return "an operand without a contiguous axis"
    gemm = fold(spec.strided(shapes_of(x)))
    if len(gemm.batch) > MAX_TMA_BATCH_NDIM:
        return f"{len(gemm.batch)} batch dimensions that do not fold"
    if len(planes.pairs) * gemm.k > MAX_EXTENT:
        return f"k={gemm.k} as that of {len(planes.pairs)} products"
    results = gemm.m * gemm.n
    is_large = results >= _PLANE_RESULTS and results * gemm.k >= _PLANE_PRODUCTS
    is_large = is_large and min(gemm.m, gemm.n) >= _PLANE_ROWS and gemm.k >= _PLANE_K
    if not (is_large or (strict and min(results, gemm.k) > 0)):
        return f"{gemm.m} x {gemm.n} x {gemm.k} is too little to multiply by planes"
    return added_up_in_parts(planes, results, gemm.k)


def added_up_in_parts(planes: PlaneProduct, results: int, k: int) -> str | None:
    """Returns why XLA is more accurate because it adds up parts of k, if it is.

    Args:
        planes: the products that would be added up.
        results: number of results of the real product, for one matrix of the batch.
        k: k of the real product.
    """
    if results >= _RESULTS_IN_PARTS or k <= _K_IN_PARTS.get(planes.name, k):
        return None
    return f"{planes.name} of {results} results, whose k={k} XLA adds up in parts"


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
    if len(gemm.batch) > (MAX_BATCH_NDIM if takes_any else MAX_TMA_BATCH_NDIM):
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


def no_complex_kernel(
    x: Operands,
    spec: GemmSpec,
    algorithm: str | None,
    planes: PlaneProduct | None,
    *,
    strict: bool = False,
) -> str | None:
    """Returns why complex numbers are not multiplied as pairs of real ones, or ``None``.

    Args:
        x: the operands.
        spec: the primitive's parameters.
        algorithm: algorithm of the real product; ``None`` if there is none.
        planes: the products of planes that would compute it, if any.
        strict: as for ``no_planes``.
    """
    if algorithm is None:
        return f"no kernel for complex64 with precision {spec.precision}"
    if spec.config == kernel_names.XLA:
        return "by config"
    if spec.is_gated or spec.config is not None:
        return "no kernel of complex64 by that name or of two weights"
    other = devices.other_than(devices.HOPPER)
    if other is not None:
        return f"a complex product on {other}"
    if not _extension.has_kernel("TF32_TF32_F32"):
        return "no kernel in this build"
    shape = odd_shape(spec, x)
    if shape is not None:
        return shape
    gemm = fold(spec.strided(shapes_of(x)))
    if len(gemm.batch) > MAX_TMA_BATCH_NDIM or 2 * max(gemm.n, gemm.k) > MAX_EXTENT:
        return "batch dimensions that do not fold, or an extent beyond 2^29"
    extents = (gemm.m, gemm.n, gemm.k)
    is_large = math.prod(extents) >= _PAIR_PRODUCTS and min(extents) >= _PAIR_ROWS
    if not (is_large or (strict and min(extents) > 0)):
        return f"{gemm.m} x {gemm.n} x {gemm.k} is too little"
    return planes and added_up_in_parts(planes, 2 * gemm.m * gemm.n, 2 * gemm.k)


def no_ragged_kernel(
    algorithm: str | None, grouped: str, work: str, extents: tuple[Any, ...], config: str | None
) -> str | None:
    """Returns why no kernel can be used, or ``None``; slow kernels must be requested by name."""
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
