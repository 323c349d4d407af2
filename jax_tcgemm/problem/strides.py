"""Places of operands' elements: pure functions of integer shapes, axes and strides.

An operand's *axes* give the position of each role in its shape: first its batch dimensions, in the
order of the result's, then its matrix roles (``ROLES``). ``None`` stands for a dimension that the
operand lacks. The operand is broadcast along such a dimension, with stride 0.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any, NamedTuple

Axes = tuple[int | None, ...]
Shape = tuple[int, ...]


# The largest number of rows, columns or elements of k: the kernels count them in 32 bits, to the
# end of the last tile. It also limits the number of matrices in a batch.
MAX_EXTENT = 2**30


class Operands(NamedTuple):
    """One value for each operand of a gemm, in the order of the primitive's operands.

    ``None`` stands for a missing operand.
    """

    a: Any
    b: Any
    group_sizes: Any = None
    c: Any = None
    bias: Any = None
    alpha: Any = None
    beta: Any = None
    row_scale: Any = None
    column_scale: Any = None
    b2: Any = None
    bias2: Any = None
    c2: Any = None


# The matrix roles of each operand, in the order in which they follow the batch in its axes.
ROLES = Operands(
    a="mk",
    b="kn",
    group_sizes="",
    c="mn",
    bias="n",
    alpha="",
    beta="",
    row_scale="m",
    column_scale="n",
    b2="kn",
    bias2="n",
    c2="mn",
)


@dataclasses.dataclass(frozen=True)
class StridedGemm:
    """A gemm as the kernel sees it.

    Attributes:
        m: rows of the result.
        n: columns of the result.
        k: contracted extent.
        batch: batch extents; the result is row-major over ``(*batch, m, n)``.
        strides: for each operand its strides in elements: first those of the batch, then those of
            its ``ROLES``. They are all 0 for a missing operand.
    """

    m: int
    n: int
    k: int
    batch: Shape
    strides: Operands


def result_axes(name: str, axes: Axes) -> Axes:
    """Returns the axes of an operand in the roles of the result, ``(*batch, m, n)``.

    Args:
        name: an operand whose matrix roles are among those of the result.
        axes: its axes.
    """
    roles = getattr(ROLES, name)
    batch, matrix = axes[: len(axes) - len(roles)], axes[len(axes) - len(roles) :]
    position = dict(zip(roles, matrix, strict=True))
    return (*batch, position.get("m"), position.get("n"))


def row_major(shape: Shape) -> Shape:
    """Returns the strides, in elements, of a dense row-major array."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def absent_strides(batch_ndim: int) -> Operands:
    """Returns the strides of operands that are all missing."""
    return Operands(*((0,) * (batch_ndim + len(roles)) for roles in ROLES))


def strided_gemm(axes: Operands, shapes: Operands) -> StridedGemm:
    """Returns the gemm of dense row-major operands of these shapes."""
    factors = [
        (places, shape)
        for places, shape in zip(axes[:3], shapes[:3], strict=True)  # a, b and group_sizes
        if places is not None
    ]
    batch = tuple(
        next(shape[places[i]] for places, shape in factors if places[i] is not None)
        for i in range(len(axes.a) - 2)
    )

    def strides(axes: Axes | None, shape: Shape | None, roles: str) -> Shape:
        if axes is None or shape is None:
            return (0,) * (len(batch) + len(roles))
        dense = row_major(shape)
        return tuple(0 if axis is None else dense[axis] for axis in axes)

    return StridedGemm(
        m=shapes.a[axes.a[-2]],
        n=shapes.b[axes.b[-1]],
        k=shapes.a[axes.a[-1]],
        batch=batch,
        strides=Operands(*map(strides, axes, shapes, ROLES)),
    )


def fold(gemm: StridedGemm) -> StridedGemm:
    """Returns the same gemm with as few batch dimensions as strides can express.

    - Batch dimensions of extent 1 are removed.
    - Trailing batch dimensions become rows if they continue the rows of all operands that have
      rows. So ``x (B, T, k) @ w (k, n)`` is one product.
    - Neighbouring batch dimensions become one if one stride steps through both.
    """
    strides = [[*each] for each in gemm.strides]
    with_rows = [each for each, roles in zip(strides, ROLES, strict=True) if "m" in roles]
    without_rows = [each for each, roles in zip(strides, ROLES, strict=True) if "m" not in roles]
    m, batch = _fold(gemm, with_rows, without_rows)
    return dataclasses.replace(gemm, m=m, batch=batch, strides=Operands(*map(tuple, strides)))


def fold_beside(
    gemm: StridedGemm, others: tuple[Shape, ...], keeps_rows: bool = False
) -> tuple[StridedGemm, tuple[Shape, ...]]:
    """Folds a gemm as ``fold`` does, as far as other operands allow.

    Args:
        gemm: the gemm of only ``a`` and ``b``.
        others: strides of operands along ``(*batch, m, n)``.
        keeps_rows: whether batch dimensions must not become rows.

    Returns:
        The folded gemm, and the others' strides in its dimensions.
    """
    a, b, *rest = ([*each] for each in (gemm.strides.a, gemm.strides.b, *others))
    m, batch = _fold(gemm, [a, *rest], [b], keeps_rows)
    strides = absent_strides(len(batch))._replace(a=tuple(a), b=tuple(b))
    folded = dataclasses.replace(gemm, m=m, batch=batch, strides=strides)
    return folded, tuple(map(tuple, rest))


def _fold(
    gemm: StridedGemm,
    with_rows: list[list[int]],
    without_rows: list[list[int]],
    keeps_rows: bool = False,
) -> tuple[int, Shape]:
    """Folds the strides in place, and returns the rows and the batch that remain.

    Args:
        gemm: the gemm.
        with_rows: strides of the operands that have rows, first those of the batch, then m.
        without_rows: strides of all others, first those of the batch.
        keeps_rows: whether batch dimensions must not become rows.
    """
    m, batch = gemm.m, [*gemm.batch]
    every = (*with_rows, *without_rows)

    def drop(i: int) -> None:
        for each in (batch, *every):
            del each[i]

    for i in reversed(range(len(batch))):
        if batch[i] == 1:
            drop(i)
    while not keeps_rows and batch and m * batch[-1] <= MAX_EXTENT:
        i = len(batch) - 1
        if any(each[i] for each in without_rows):
            break
        if m == 1:  # the stride of one row is never used, and the batch's stride replaces it
            for each in with_rows:
                each[i + 1] = each[i]
        elif any(each[i] != m * each[i + 1] for each in with_rows):
            break
        m *= batch[i]
        drop(i)
    for i in reversed(range(len(batch) - 1)):
        if all(each[i] == each[i + 1] * batch[i + 1] for each in every):
            batch[i + 1] *= batch[i]
            drop(i)
    return m, tuple(batch)


def has_unit_stride(strides: Shape, extents: tuple[int, int]) -> bool:
    """Checks if a kernel can read a matrix operand: one of its axes is contiguous.

    Args:
        strides: the operand's strides, its two matrix strides last.
        extents: the extents of the two matrix axes; the stride of an extent of 1 is not used.
    """
    return any(s == 1 or e <= 1 for s, e in zip(strides[-2:], extents, strict=True))


def matrix_last(axes: Axes) -> tuple[int, ...]:
    """Returns the permutation that brings an operand's axes into the order of ``axes``."""
    return tuple(axis for axis in axes if axis is not None)


def permuted(axes: Axes) -> Axes:
    """Returns the axes of an operand that was transposed by ``matrix_last``."""
    position = itertools.count()
    return tuple(None if axis is None else next(position) for axis in axes)


def insert_batch(axes: Axes, position: int | None) -> Axes:
    """Returns the axes of an operand that gains an outermost batch dimension.

    Args:
        axes: the operand's axes without it.
        position: position of the batch dimension in the operand's new shape; ``None`` broadcasts
            the operand.
    """
    if position is None:
        return (None, *axes)
    return (position, *(x if x is None or x < position else x + 1 for x in axes))


def insert_batches(axes: Operands, positions: Operands) -> Operands:
    """Applies ``insert_batch`` to the axes of each operand that is present."""
    return Operands(
        *(
            None if present is None else insert_batch(present, position)
            for present, position in zip(axes, positions, strict=True)
        )
    )


def merge(axes: Axes, shape: Shape, outer: int, inner: int) -> tuple[Axes, Shape] | None:
    """Merges role ``outer`` into role ``inner`` when they are neighbours in memory.

    Args:
        axes: an operand's axes.
        shape: its shape.
        outer: index in ``axes`` of the role that disappears.
        inner: index in ``axes`` of the role that absorbs it.

    Returns:
        The new axes and the shape to reshape to, without moving an element; ``None`` when the two
        are not neighbours.
    """
    position = axes[outer]
    if position is None or axes[inner] != position + 1:
        return None
    merged_shape = (
        *shape[:position],
        shape[position] * shape[position + 1],
        *shape[position + 2 :],
    )
    merged = tuple(x if x is None or x <= position else x - 1 for x in axes)
    return merged[:outer] + merged[outer + 1 :], merged_shape
