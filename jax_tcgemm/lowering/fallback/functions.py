"""Reasons why a function follows its product, in place of an epilogue of the kernel."""

from __future__ import annotations

import math

from jax_tcgemm import _core
from jax_tcgemm.epilogue.program import Program
from jax_tcgemm.problem.alignment import COPY_BYTES, unaligned_stride
from jax_tcgemm.problem.strides import MAX_EXTENT, StridedGemm

# Products of 8 and 16 bits with up to this many rows or columns have kernels of their own. Those of
# 16 bits are for up to one batch dimension; if there are two weights, for few rows. There are none
# for float32.
FEW_ROWS = _core.FEW_ROWS


def unfit_for_functions(
    gemm: StridedGemm, second_weight: int, itemsize: int, *, is_gated: bool, is_grouped: bool
) -> str | None:
    """Returns why TMA cannot read the factors or why the kernels would be slow, if so.

    Args:
        gemm: the product as a kernel sees it.
        second_weight: distance of the second weight from the first one, in elements.
        itemsize: bytes of an element of a factor.
        is_gated: whether there are two weights.
        is_grouped: whether each group has a weight.
    """
    if not gemm.m * gemm.n * gemm.k * math.prod(gemm.batch):
        return "an extent of 0"
    if len(gemm.batch) > _core.MAX_TMA_BATCH_RANK:
        return f"{len(gemm.batch)} batch dimensions that do not fold"
    if math.prod(gemm.batch) > MAX_EXTENT:
        return "a batch beyond 2^30"
    is_for_few = not is_grouped and len(gemm.batch) <= 1 and itemsize == 2
    is_for_few = is_for_few and (not is_gated or gemm.m < gemm.n)
    if min(gemm.m, gemm.n) <= FEW_ROWS and not (is_for_few or itemsize == 1):
        return f"{gemm.m} x {gemm.n} results of a matrix"
    for name in ("a", "b"):
        what = unaligned_stride(gemm, name, itemsize)
        if what is not None:
            return f"{name} has {what}, not a multiple of {COPY_BYTES} bytes"
    if second_weight * itemsize % COPY_BYTES:
        return "the second weight begins between multiples of 16 bytes"
    return None


# Up to this many results of all matrices, a separate kernel draws random numbers in less time. In
# the product's kernel, nothing multiplies while the last tile's numbers are drawn. Measured on an
# H200 (lab/README.md).
_FEW_DRAWN = 132 * 128 * 128 * 8


class SlowerThanXla(str):
    """The reason why XLA takes less time, for the product as well."""

    __slots__ = ()


def slower_function(gemm: StridedGemm, made: Program, is_plain: bool) -> str | None:
    """Returns why XLA is expected to compute the function in less time, if so.

    For a plain product the reason is a ``SlowerThanXla``: XLA computes the product no slower.
    """
    if not made.draws or gemm.m * gemm.n * math.prod(gemm.batch) >= _FEW_DRAWN:
        return None
    reason = f"random numbers for {gemm.m} x {gemm.n} results"
    return SlowerThanXla(reason) if is_plain else reason
