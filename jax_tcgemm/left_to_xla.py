"""Which products are XLA's own: those that it was measured to compute in less time.

The kernels copy 16 bytes at a time, so that operands off 16 bytes are copied with padding first,
and results leave in parts of rows. Where there is little to multiply, that takes longer than the
product itself, which XLA computes from the operands as they lie. The figures, of an H200, are in
``docs/performance.md``; what lies beyond what was measured is not left to XLA.
"""

from __future__ import annotations

import math

from jax_tcgemm.alignment import COPY_BYTES, elements, misalignment, padding_bytes
from jax_tcgemm.spec import INPUT_DTYPES
from jax_tcgemm.strides import StridedGemm

# Of 16-bit operands those in float32 arithmetic were measured, in bfloat16.
_MEASURED = ("BF16_BF16_F32", "F16_F16_F32", "TF32_TF32_F32")

# Rows up to which a large B, of so many columns or more, is not copied.
_FEW_ROWS = 128
_MANY_COLUMNS = 1024

# Rows of float32, for which there are no skinny kernels, and elements of B from which that shows.
_FEW_FLOAT32_ROWS = 32
_MANY_FLOAT32_WEIGHTS = 2**24

# Multiplications for each element read or written, by bytes of an element, below which memory
# limits XLA; and of what sizes that was measured.
_FEW_PRODUCTS = {2: 128, 4: 200}
_SMALLEST_EXTENT = 32
_MANY_ELEMENTS = 2**20


def left_to_xla(algorithm: str, gemm: StridedGemm, out_itemsize: int) -> str | None:
    """Says why XLA computes a product in less time than a kernel.

    Args:
        algorithm: name of the ``DotAlgorithmPreset``.
        gemm: the folded gemm.
        out_itemsize: bytes of an element of the result.

    Returns:
        A phrase, or ``None`` where the kernels are as quick.
    """
    if algorithm not in _MEASURED or not gemm.m * gemm.n * gemm.k * math.prod(gemm.batch):
        return None
    itemsize = INPUT_DTYPES[algorithm].itemsize
    return (
        _of_a_vector(gemm, itemsize)
        or _of_few_rows(gemm, itemsize)
        or _of_few_float32_rows(gemm, itemsize)
        or _of_odd_rows(gemm, itemsize, out_itemsize)
    )


def _of_a_vector(gemm: StridedGemm, itemsize: int) -> str | None:
    if itemsize != 2 or 1 not in (gemm.m, gemm.n) or not padding_bytes(gemm, itemsize):
        return None
    name = "b" if gemm.m == 1 else "a"
    what = misalignment(gemm, name, itemsize)
    return what and f"a vector, and {name} has {what}, off {COPY_BYTES} bytes"


def _of_few_rows(gemm: StridedGemm, itemsize: int) -> str | None:
    """Where B, in rows of n, would be copied. Where A is off 16 bytes, too, XLA is slower."""
    if _is_batched(gemm) or gemm.m > _FEW_ROWS or gemm.n < _MANY_COLUMNS:
        return None
    if not padding_bytes(gemm, itemsize) or misalignment(gemm, "a", itemsize) is not None:
        return None
    what = misalignment(gemm, "b", itemsize)
    if what is None or gemm.strides.b[-1] != 1:
        return None
    return f"{gemm.m} rows, and b has {what}, off {COPY_BYTES} bytes"


def _of_few_float32_rows(gemm: StridedGemm, itemsize: int) -> str | None:
    few = itemsize == 4 and gemm.m <= _FEW_FLOAT32_ROWS
    if not few or _is_batched(gemm) or gemm.n * gemm.k < _MANY_FLOAT32_WEIGHTS:
        return None
    return f"{gemm.m} rows of float32"


def _of_odd_rows(gemm: StridedGemm, itemsize: int, out_itemsize: int) -> str | None:
    """Where most of what is read and written lies in rows off 16 bytes, and is used little."""
    products = 1 / (1 / gemm.m + 1 / gemm.n + 1 / gemm.k)
    if products >= _FEW_PRODUCTS[itemsize] or min(gemm.m, gemm.n) < _SMALLEST_EXTENT:
        return None
    aligned = {name: misalignment(gemm, name, itemsize) is None for name in ("a", "b")}
    if not (_is_batched(gemm) or all(aligned.values())):
        return None
    aligned["d"] = gemm.n * out_itemsize % COPY_BYTES == 0
    d_elements = math.prod(gemm.batch) * gemm.m * gemm.n
    count = {"a": elements(gemm, "a"), "b": elements(gemm, "b"), "d": d_elements}
    if sum(count.values()) < _MANY_ELEMENTS:
        return None
    count["d"] *= 2  # parts of rows cost more to write than to copy
    odd = [name for name in count if not aligned[name]]
    if 2 * sum(count[name] for name in odd) < sum(count.values()):
        return None
    return (
        f"{products:.0f} products an element, and rows of {', '.join(odd)} off {COPY_BYTES} bytes"
    )


def _is_batched(gemm: StridedGemm) -> bool:
    return math.prod(gemm.batch) != 1
