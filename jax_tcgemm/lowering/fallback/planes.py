"""Reasons why planes of float32, or pairs of real numbers, are not multiplied by kernels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jax_tcgemm import _core, _extension
from jax_tcgemm.epilogue import compiler
from jax_tcgemm.kernels import names as kernel_names
from jax_tcgemm.kernels.arithmetic import PlaneProduct
from jax_tcgemm.lowering import devices
from jax_tcgemm.lowering.custom_call import shapes_of
from jax_tcgemm.lowering.fallback.kernels import odd_operands
from jax_tcgemm.problem.arithmetic import resolve_planes
from jax_tcgemm.problem.spec import GemmSpec, with_kernel_layouts
from jax_tcgemm.problem.strides import MAX_EXTENT, Operands, fold

# Complex products take less time than XLA's own from this many multiplications per matrix of the
# batch on, and from this many rows, columns and k on. Measured on an H200 (lab/README.md).
_PAIR_PRODUCTS = 2**29
_PAIR_ROWS = 256

# Products of planes take less time than XLA's own product from these numbers per matrix of the
# batch on: multiplications, results, rows or columns, and k. Measured on an H200
# (lab/README.md). With fewer results XLA adds up parts of k, in less time and with less
# error.
_PLANE_PRODUCTS = 2**28
_PLANE_RESULTS = 2**18
_PLANE_ROWS = 256
_PLANE_K = 256
# XLA adds up parts of k if there are fewer results than this. If k is also longer than this, XLA is
# more accurate than float32 sums over all k-tiles (lab/precision.md).
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
    if spec.work != "none" and not compiler.may_compile_rows():
        return f"no fused kernel for {planes.name} in this build"
    if spec.is_gated:
        return f"no gated kernel for {planes.name}"
    odd = odd_operands(spec, x)
    if odd is not None:
        return odd
    if with_kernel_layouts(spec, shapes_of(x))[0] != spec:
        return "an operand without a contiguous axis"
    gemm = fold(spec.strided(shapes_of(x)))
    if len(gemm.batch) > _core.MAX_TMA_BATCH_RANK:
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
    odd = odd_operands(spec, x)
    if odd is not None:
        return odd
    gemm = fold(spec.strided(shapes_of(x)))
    if len(gemm.batch) > _core.MAX_TMA_BATCH_RANK or 2 * max(gemm.n, gemm.k) > MAX_EXTENT:
        return "batch dimensions that do not fold, or an extent beyond 2^29"
    extents = (gemm.m, gemm.n, gemm.k)
    is_large = math.prod(extents) >= _PAIR_PRODUCTS and min(extents) >= _PAIR_ROWS
    if not (is_large or (strict and min(extents) > 0)):
        return f"{gemm.m} x {gemm.n} x {gemm.k} is too little"
    return planes and added_up_in_parts(planes, 2 * gemm.m * gemm.n, 2 * gemm.k)
