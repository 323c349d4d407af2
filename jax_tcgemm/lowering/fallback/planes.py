"""Reasons why planes of float32, or pairs of real numbers, are not multiplied by kernels."""

from __future__ import annotations

import dataclasses
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
from jax_tcgemm.problem.alignment import elements, is_transposed
from jax_tcgemm.problem.arithmetic import resolve_planes
from jax_tcgemm.problem.spec import GemmSpec, with_kernel_layouts
from jax_tcgemm.problem.strides import MAX_EXTENT, Operands, StridedGemm, fold

# Times in microseconds, fitted to 120 products on an H200 (lab/precision.md). A wave is one tile on
# each multiprocessor. XLA takes less time for few results of a long k, because no kernel for planes
# or pairs divides k.
_SMS = 132
_PLANE_TILES = {(64, 128): 1.0, (128, 128): 1.8}  # with the time of a wave, in those of the first
_PLANE_START = 10.0
# For each k, by the number of products of planes; nine were not timed.
_PLANE_WAVE = {3: 8.5e-3, 6: 15.2e-3, 9: 22.8e-3}
# To split an element into planes, by their number; more if k is not contiguous; to write a result.
_SPLIT = {2: 2.2e-6, 3: 2.6e-6}
_SPLIT_TURNED = 0.8e-6
_SPLIT_OF_BATCHES = 1.5  # times as long
_RESULT = 1.2e-6
_PAIR_TILE = (128, 128)
_PAIR_START = 4.5
_PAIR_WAVE = 10.5e-3  # for each k of the real product
# XLA writes a complex element of A in another order, and one of B as four numbers.
_MOVED = 4e-6
_EXPANDED = 10e-6
# XLA's start, and its real operations in a microsecond.
_XLA_START = 6.5
_XLA_PAIR_START = 8.0
_XLA_RATE = {
    "F32_F32_F32": 47e6,
    "BF16_BF16_F32_X9": 47e6,
    "BF16_BF16_F32_X6": 64e6,
    "TF32_TF32_F32_X3": 75e6,
    "BF16_BF16_F32_X3": 100e6,
}
_XLA_PAIR_RATE = 160e6
# A kernel takes products for which it needs less than this share of XLA's time. A shorter real k,
# and fewer multiplications of real or complex numbers, were not measured.
_SHARE = 0.95
_LEAST_K = 256
_LEAST_WORK = 2**26
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
    if not math.prod((gemm.m, gemm.n, gemm.k)):
        return "nothing to multiply"
    xla_time = _XLA_START + 2 * _work(gemm) / _XLA_RATE[planes.name]
    slower = None if strict else _slower(gemm, 1, _plane_time(planes, gemm), xla_time)
    return slower or added_up_in_parts(planes, gemm.m * gemm.n, gemm.k)


def _slower(gemm: StridedGemm, parts: int, time: float, xla_time: float) -> str | None:
    """Returns why XLA is expected to take less time, if it is.

    Args:
        gemm: the folded product.
        parts: real numbers of an element.
        time: microseconds by a kernel.
        xla_time: microseconds by XLA.
    """
    shown = " x ".join(map(str, (gemm.m, gemm.n, gemm.k)))
    batch = f", batch {math.prod(gemm.batch)}" if gemm.batch else ""
    if parts * gemm.k < _LEAST_K or _work(gemm) < _LEAST_WORK:
        return f"{shown}{batch}, for which no kernel was measured"
    is_faster = time < _SHARE * xla_time
    return None if is_faster else f"{shown}{batch}, for which XLA takes less time"


def _work(gemm: StridedGemm) -> int:
    return gemm.m * gemm.n * gemm.k * math.prod(gemm.batch)


def _plane_time(planes: PlaneProduct, gemm: StridedGemm) -> float:
    """Returns the microseconds to split operands into planes and to multiply these."""
    split = _SPLIT[planes.count]
    of_a = split + is_transposed(gemm, "a") * _SPLIT_TURNED
    of_b = split + (not is_transposed(gemm, "b")) * _SPLIT_TURNED
    passes = elements(gemm, "a") * of_a + elements(gemm, "b") * of_b
    passes *= _SPLIT_OF_BATCHES if gemm.batch else 1.0
    waves = min(_waves(gemm, tile) * time for tile, time in _PLANE_TILES.items())
    product = waves * gemm.k * _PLANE_WAVE[len(planes.pairs)]
    written = gemm.m * gemm.n * math.prod(gemm.batch) * _RESULT
    return _PLANE_START + passes + product + written


def _waves(gemm: StridedGemm, tile: tuple[int, int]) -> int:
    tiles = math.ceil(gemm.m / tile[0]) * math.ceil(gemm.n / tile[1]) * math.prod(gemm.batch)
    return math.ceil(tiles / _SMS)


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
    in_pairs: bool,
    strict: bool = False,
) -> str | None:
    """Returns why complex numbers are not multiplied as pairs of real ones, or ``None``.

    Args:
        x: the operands.
        spec: the primitive's parameters.
        algorithm: algorithm of the real product; ``None`` if there is none.
        planes: the products of planes that would compute it, if any.
        in_pairs: whether a kernel reads B as it is, without planes.
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
    if not math.prod((gemm.m, gemm.n, gemm.k)):
        return "nothing to multiply"
    real = dataclasses.replace(gemm, n=2 * gemm.n, k=2 * gemm.k)
    time = _MOVED * elements(gemm, "a") if is_transposed(gemm, "a") else 0.0
    if planes is not None:
        time += _plane_time(planes, real)
        xla_time = _XLA_START + 8 * _work(gemm) / _XLA_RATE[planes.name]
    else:
        time += _PAIR_START + _waves(real, _PAIR_TILE) * real.k * _PAIR_WAVE
        time += 0.0 if in_pairs else _EXPANDED * elements(gemm, "b")
        xla_time = _XLA_PAIR_START + 8 * _work(gemm) / _XLA_PAIR_RATE
    slower = None if strict else _slower(gemm, 2, time, xla_time)
    if slower is not None:
        return slower
    return planes and added_up_in_parts(planes, real.m * real.n, real.k)
