"""Checks operands' alignment for 16-byte copies; computes a gemm's workspace size."""

from __future__ import annotations

import math

from jax_tcgemm import _core
from jax_tcgemm.problem.strides import StridedGemm

# cp.async copies this many bytes at a time, between addresses that are multiples of it.
COPY_BYTES = 16

# A line of L2.
LINE_BYTES = 128


def misalignment(gemm: StridedGemm, name: str, itemsize: int) -> str | None:
    """Returns what prevents 16-byte copies of an operand, whatever its base address.

    Args:
        gemm: the folded gemm.
        name: ``"a"`` or ``"b"``.
        itemsize: bytes of an element.

    Returns:
        A phrase such as ``"a leading dimension of 1001 elements"``, or ``None`` if nothing does.
    """
    what = unaligned_stride(gemm, name, itemsize)
    _, _, _, columns = _layout(gemm, name)
    if what is None and columns * itemsize % COPY_BYTES:
        return f"a contiguous extent of {columns} elements"
    return what


def unaligned_stride(gemm: StridedGemm, name: str, itemsize: int) -> str | None:
    """Returns what prevents TMA copies of an operand; arguments as in ``misalignment``."""
    batch_strides, rows, row_stride, _ = _layout(gemm, name)
    for what, value in (
        *(("a batch stride", stride) for stride in batch_strides),
        ("a leading dimension", row_stride if rows > 1 else 0),
    ):
        if value * itemsize % COPY_BYTES:
            return f"{what} of {value} elements"
    return None


def row_alignment(gemm: StridedGemm, name: str, itemsize: int, *, is_padded: bool = False) -> int:
    """Returns the alignment of the row stride, in bytes, up to a line of L2.

    The result is that of ``row_alignment`` of ``cuda/dispatch/choice.cc``.

    Args:
        gemm: the folded gemm.
        name: ``"a"`` or ``"b"``.
        itemsize: bytes of an element.
        is_padded: whether a misaligned operand is copied first.
    """
    _, rows, row_stride, columns = _layout(gemm, name)
    if is_padded and misalignment(gemm, name, itemsize) is not None:
        return math.gcd(LINE_BYTES, _pitch(columns * itemsize))
    return math.gcd(LINE_BYTES, row_stride * itemsize if rows > 1 else 0)


# The most float32 elements of all parts together, and the least k for which parts are worth it.
_SPLIT_ELEMENTS = 132 * 128 * 256  # results that keep every SM of the largest GPU busy
_SPLIT_K = 1024


def split_bytes(gemm: StridedGemm) -> int:
    """Returns the bytes for the parts of a small result of a long k.

    The dispatch decides if it computes parts, and how many, when the GPU is known.
    """
    return most_split_bytes(gemm) if gemm.k >= _SPLIT_K else 0


def most_split_bytes(gemm: StridedGemm) -> int:
    """Returns the bytes of the most parts that may be worth a measurement, for any k."""
    results = gemm.m * gemm.n
    if not results or math.prod(gemm.batch) != 1:
        return 0
    splits = min(_core.MOST_SPLITS, _SPLIT_ELEMENTS // results)
    return 4 * splits * results if splits > 1 else 0


def named_split_bytes(gemm: StridedGemm, splits: int, tile_m: int, tile_n: int) -> int:
    """Returns the bytes that a row needs to split k: whole tiles and their flags.

    Args:
        gemm: the folded gemm.
        splits: number of parts; 1 needs nothing.
        tile_m: rows that a cluster computes.
        tile_n: columns that a cluster computes.
    """
    if splits == 1 or math.prod(gemm.batch) != 1 or gemm.n % _core.VECTOR_COLUMNS:
        return 0
    m, n = (-(-extent // tile) * tile for extent, tile in ((gemm.m, tile_m), (gemm.n, tile_n)))
    return 4 * splits * m * n + _core.FIXUP_FLAG_BYTES


# Blocks that add up parts of k: how many run at once on the largest GPU, and the largest tile.
_ADDING_BLOCKS, _ADDED_TILE = 132, 128


def bytes_of_added_parts(gemm: StridedGemm) -> int:
    """Returns the bytes in which the blocks of a kernel may add up parts of k.

    There are none if more than half of the blocks that run at once would have a tile of their own.
    The dispatch decides if they add up parts.
    """
    tiles = math.prod(-(-extent // _ADDED_TILE) for extent in (gemm.m, gemm.n))
    if gemm.k < _SPLIT_K or 2 * tiles > _ADDING_BLOCKS or math.prod(gemm.batch) != 1:
        return 0
    return 4 * _ADDING_BLOCKS * _ADDED_TILE**2 + _core.FIXUP_FLAG_BYTES


# From these sizes on, copies cost less than realigning, although they take one more kernel:
# lab/README.md. If k is short, the kernel must read an operand often enough.
_PADDED_K = 224
_PADDED_PRODUCTS = 3e7
_PADDED_READS = 32


def padding_bytes(gemm: StridedGemm, itemsize: int) -> int:
    """Returns the bytes of workspace for padded copies of misaligned operands.

    One pass over an operand costs less than realigning it tile by tile each time it is read.
    Exception: products that take only a moment. The result is 0 for those.

    Args:
        gemm: the folded gemm.
        itemsize: bytes of an element of ``a`` and ``b``.
    """
    products = gemm.m * gemm.n * gemm.k * math.prod(gemm.batch)
    reads = gemm.m * gemm.n / max(1, gemm.m + gemm.n)
    is_many = products >= _PADDED_PRODUCTS and reads >= _PADDED_READS
    if products == 0 or (gemm.k < _PADDED_K and not is_many):
        return 0
    total = 0
    for name in ("a", "b"):
        if misalignment(gemm, name, itemsize) is None:
            continue
        _, _, _, columns = _layout(gemm, name)
        rows = elements(gemm, name) // columns
        total += -(-rows * _pitch(columns * itemsize) // LINE_BYTES) * LINE_BYTES
    return total


def plane_bytes(gemm: StridedGemm, count: int) -> int:
    """Returns the bytes of workspace for the bfloat16 planes of both operands.

    ``plan_split`` of ``cuda/passes/split_planes.cu`` lays out the planes. The workspace also holds
    what ``launch_splits`` notes about the operands.

    Args:
        gemm: the folded gemm, of float32 operands.
        count: number of planes of an operand.
    """
    k = count * _rounded_up(gemm.k, _core.PLANE_TILE_K)
    total = _core.SPLIT_STATE_BYTES
    for name, extent_mn in (("a", gemm.m), ("b", gemm.n)):
        batch_strides, *_ = _layout(gemm, name)
        batch = (extent for extent, stride in zip(gemm.batch, batch_strides, strict=True) if stride)
        total += _rounded_up(2 * math.prod(batch) * k * extent_mn, LINE_BYTES)
    return total


def _rounded_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def is_transposed(gemm: StridedGemm, name: str) -> bool:
    """Checks if ``"a"`` is stored as ``(k, m)``, or ``"b"`` as ``(n, k)``."""
    return _is_mn_major(gemm, name) == (name == "a")


def layouts(gemm: StridedGemm) -> str:
    """Returns the layouts of ``a`` and ``b``, each ``n``, or ``t`` if it is transposed."""
    return "".join("t" if is_transposed(gemm, name) else "n" for name in ("a", "b"))


def elements(gemm: StridedGemm, name: str) -> int:
    """Returns the element count of ``"a"`` or ``"b"``; a broadcast matrix counts once."""
    batch_strides, rows, _, columns = _layout(gemm, name)
    batch = (extent for extent, stride in zip(gemm.batch, batch_strides, strict=True) if stride)
    return math.prod(batch) * rows * columns


def _pitch(row_bytes: int) -> int:
    """Returns the bytes from one row of a padded copy to the next.

    The same as in ``cuda/passes/pad_operand.cu``: each row lies in as few lines of L2 as possible.
    """
    if row_bytes > LINE_BYTES // 2:
        return -(-row_bytes // LINE_BYTES) * LINE_BYTES
    return max(COPY_BYTES, 1 << (row_bytes - 1).bit_length())


def _layout(gemm: StridedGemm, name: str) -> tuple[tuple[int, ...], int, int, int]:
    """Returns an operand's batch strides, rows, row stride and columns, columns contiguous.

    If either axis may count as contiguous, the choice is that of ``cuda/ffi/factors.cc``.
    """
    strides = getattr(gemm.strides, name)
    if name == "a":
        extent_mn, stride_mn, stride_k = gemm.m, *strides[-2:]
    else:
        extent_mn, stride_k, stride_mn = gemm.n, *strides[-2:]
    if _is_mn_major(gemm, name):
        return strides[:-2], gemm.k, stride_k, extent_mn
    return strides[:-2], extent_mn, stride_mn, gemm.k


def _is_mn_major(gemm: StridedGemm, name: str) -> bool:
    *_, first, second = getattr(gemm.strides, name)
    stride_mn, stride_k = (first, second) if name == "a" else (second, first)
    if stride_mn == 1 and (stride_k != 1 or gemm.k <= 1):
        return True
    return not (stride_k == 1 or gemm.k <= 1)
