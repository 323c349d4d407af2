"""Products that XLA was measured to compute in less time than the kernels.

The kernels copy 16 bytes at a time. So unaligned operands are copied with padding first, and
unaligned results leave in parts of rows. For small products that takes longer than the product
itself, which XLA computes from the operands in place. There are no kernels for few rows of float32,
and no tiles as small as those of small batches. The figures, from an H200, are in
``lab/README.md``. They are for float32 and for bfloat16; float16 is assumed to be like
bfloat16.
"""

from __future__ import annotations

import math

import numpy as np

from jax_tcgemm.problem.alignment import (
    COPY_BYTES,
    elements,
    is_transposed,
    misalignment,
    padding_bytes,
)
from jax_tcgemm.problem.arithmetic import INPUT_DTYPES, sum_dtype
from jax_tcgemm.problem.strides import StridedGemm

# Up to _FEW_ROWS rows, a B of _MANY_COLUMNS or more columns is not copied.
_FEW_ROWS = 128
_MANY_COLUMNS = 1024

# XLA is faster for this few rows of float32 if both extents of B are large. It is also faster for
# even fewer rows if there are many columns and they are _WIDE times k or more.
_FEW_FLOAT32_ROWS = 32
_LARGE_FLOAT32_EXTENT = 4096
_FEWER_FLOAT32_ROWS = 16
_MANY_FLOAT32_COLUMNS = 5000
# One row was measured from _MANY_OF_A_ROW elements of B on. From _SLOW_COLUMNS columns on, XLA
# takes long to add up a long k down columns of B.
_MANY_OF_A_ROW = 2**20
_SLOW_COLUMNS = 1024

# Up to _FEW_COPIED_ROWS rows of 16 bits, a transposed A is not copied if B has _WIDE_COLUMNS or
# more columns and they are _WIDE times k or more.
_FEW_COPIED_ROWS = 64
_WIDE_COLUMNS = 10_000
_WIDE = 2

# Small batches: the largest values of the smaller and the larger extent of D, and the largest k.
# _MANY_BATCHES is the smallest measured batch, by bytes of an element.
_SMALL_EXTENTS = (32, 128)
_SMALL_K = 128
_MANY_BATCHES = {2: 128, 4: 1024}

# Memory limits XLA below this many multiplications for each element read or written, by bytes of an
# element. This was measured from _SMALLEST_EXTENT and _MANY_ELEMENTS on.
_FEW_PRODUCTS = {2: 128, 4: 200}
_SMALLEST_EXTENT = 32
_MANY_ELEMENTS = 2**20


def why_slower(
    algorithm: str,
    gemm: StridedGemm,
    out_itemsize: int,
    *,
    is_plain: bool = True,
    has_factor: bool = False,
) -> str | None:
    """Returns why a kernel takes longer than XLA for a product.

    Args:
        algorithm: name of the ``DotAlgorithmPreset``.
        gemm: the folded gemm; ``a`` and ``b`` each have a contiguous axis that is not a batch axis.
        out_itemsize: bytes of an element of the result.
        is_plain: whether there is no epilogue except a factor.
        has_factor: whether there is a factor.

    Returns:
        A phrase, or ``None`` if XLA is slower or this was not measured.
    """
    if sum_dtype(algorithm) != np.float32 or not gemm.m * gemm.n * gemm.k * math.prod(gemm.batch):
        return None
    itemsize = INPUT_DTYPES[algorithm].itemsize
    return (
        _of_a_vector(gemm, itemsize)
        or _of_few_rows(gemm, itemsize)
        or _of_few_copied_rows(gemm, itemsize)
        or _of_few_float32_rows(gemm, itemsize)
        or (
            _of_small_batches(gemm, itemsize, out_itemsize) if is_plain and not has_factor else None
        )
        or (_of_odd_rows(gemm, itemsize, out_itemsize) if is_plain else None)
    )


def _of_a_vector(gemm: StridedGemm, itemsize: int) -> str | None:
    if itemsize != 2 or 1 not in (gemm.m, gemm.n) or not padding_bytes(gemm, itemsize):
        return None
    name = "b" if gemm.m == 1 else "a"
    what = misalignment(gemm, name, itemsize)
    return what and f"a vector, and {name} has {what}, unaligned"


def _of_few_rows(gemm: StridedGemm, itemsize: int) -> str | None:
    """Returns the reason if a B in rows of n would be copied.

    If A is unaligned too, XLA is slower.
    """
    if gemm.batch or gemm.m > _FEW_ROWS or gemm.n < _MANY_COLUMNS:
        return None
    if not padding_bytes(gemm, itemsize) or misalignment(gemm, "a", itemsize) is not None:
        return None
    what = misalignment(gemm, "b", itemsize)
    if what is None or gemm.strides.b[-1] != 1:
        return None
    return f"few rows, {gemm.m}, and b has {what}, unaligned"


def _of_few_copied_rows(gemm: StridedGemm, itemsize: int) -> str | None:
    """Returns the reason if A is copied for a product that takes hardly longer than a launch."""
    if itemsize != 2 or gemm.batch or gemm.m > _FEW_COPIED_ROWS:
        return None
    if gemm.n < max(_WIDE_COLUMNS, _WIDE * gemm.k) or not padding_bytes(gemm, itemsize):
        return None
    if not is_transposed(gemm, "a") or misalignment(gemm, "b", itemsize) is not None:
        return None
    what = misalignment(gemm, "a", itemsize)
    return what and f"few rows, {gemm.m}, and a has {what}, unaligned"


def _of_few_float32_rows(gemm: StridedGemm, itemsize: int) -> str | None:
    if itemsize != 4 or gemm.batch or gemm.m > _FEW_FLOAT32_ROWS:
        return None
    is_large = min(gemm.n, gemm.k) >= _LARGE_FLOAT32_EXTENT
    is_wide = gemm.n >= max(_MANY_FLOAT32_COLUMNS, _WIDE * gemm.k)
    is_slow = gemm.strides.b[-1] == 1 and gemm.k >= 2 * gemm.n and gemm.n >= _SLOW_COLUMNS
    is_row = gemm.m == 1 and gemm.n * gemm.k >= _MANY_OF_A_ROW
    if is_large or (is_wide and gemm.m <= _FEWER_FLOAT32_ROWS) or (is_row and not is_slow):
        return f"few rows, {gemm.m}, of float32"
    return None


def _of_small_batches(gemm: StridedGemm, itemsize: int, out_itemsize: int) -> str | None:
    """Returns the reason if a tile of any kernel lies mostly beyond D.

    This covers only operands as they were measured. XLA may have to copy an operand that a batch
    shares or has in another order. XLA may also write float32 before it multiplies by a factor, or
    if float32 is the result.
    """
    few, more = sorted((gemm.m, gemm.n))
    is_small = few <= _SMALL_EXTENTS[0] and more <= _SMALL_EXTENTS[1] and gemm.k <= _SMALL_K
    if not is_small or math.prod(gemm.batch) < _MANY_BATCHES[itemsize]:
        return None
    *batch_a, _, column_a = gemm.strides.a
    *batch_b, _, column_b = gemm.strides.b
    is_as_measured = column_a == column_b == 1 and out_itemsize == itemsize
    if not is_as_measured or not all(batch_a + batch_b):
        return None
    return f"small batches, {gemm.m} x {gemm.n} x {gemm.k}"


def _of_odd_rows(gemm: StridedGemm, itemsize: int, out_itemsize: int) -> str | None:
    """Returns the reason if most of the data is unaligned and little used."""
    aligned = {name: misalignment(gemm, name, itemsize) is None for name in ("a", "b")}
    if not (gemm.batch or all(aligned.values())):
        return None
    aligned["d"] = gemm.n * out_itemsize % COPY_BYTES == 0
    results = math.prod(gemm.batch) * gemm.m * gemm.n
    count = {"a": elements(gemm, "a"), "b": elements(gemm, "b"), "d": results}
    products = results * gemm.k / sum(count.values())
    is_small = min(gemm.m, gemm.n, gemm.k) < _SMALLEST_EXTENT
    if is_small or sum(count.values()) < _MANY_ELEMENTS or products >= _FEW_PRODUCTS[itemsize]:
        return None
    count["d"] *= 2  # parts of rows cost more to write than to copy
    odd = [name for name in count if not aligned[name]]
    if 2 * sum(count[name] for name in odd) < sum(count.values()):
        return None
    return f"{products:.0f} products an element, and {', '.join(odd)} unaligned"
