"""Scaled operands as matrices: merges dimensions in any order to rows, columns and k."""

from __future__ import annotations

import math
import operator

import jax
from jax import lax

from jax_tcgemm.problem.strides import Shape
from jax_tcgemm.quantized import arrays
from jax_tcgemm.quantized.scaled_array import ScaledArray

_Dims = tuple[int, ...]
DimensionNumbers = tuple[tuple[_Dims, _Dims], tuple[_Dims, _Dims]]


def matrices(
    lhs: ScaledArray, rhs: ScaledArray, dims: DimensionNumbers
) -> list[tuple[ScaledArray, bool]]:
    """Returns the operands as matrices after the batch, and whether each is transposed."""
    (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = dims
    pairs = list(zip(lhs_contracted, rhs_contracted, strict=True))
    # The contracted dimensions follow the order of the larger operand, so that only the smaller one
    # is copied.
    sizes = [x.value.size for x in (lhs, rhs)]
    is_known = all(isinstance(size, int) for size in sizes)
    pairs.sort(key=operator.itemgetter(1 if is_known and sizes[0] < sizes[1] else 0))
    return [
        _matrix(lhs, lhs_batch, tuple(pair[0] for pair in pairs), k_comes_first=False),
        _matrix(rhs, rhs_batch, tuple(pair[1] for pair in pairs), k_comes_first=True),
    ]


def _matrix(
    x: ScaledArray, batch: _Dims, contracted: _Dims, k_comes_first: bool
) -> tuple[ScaledArray, bool]:
    """Returns ``(*batch, m, k)``, or ``(*batch, k, m)``, and whether it is transposed.

    Args:
        x: the operand.
        batch: its batch dimensions.
        contracted: its contracted dimensions.
        k_comes_first: whether k comes first in a matrix that is not transposed.
    """
    free = tuple(d for d in range(len(x.shape)) if d not in (*batch, *contracted))
    groups = [(contracted, free), (free, contracted)]
    in_place = [pair for pair in groups if _lies_so((*batch, *pair[0], *pair[1]), x.shape)]
    # A copy has k last, because tensor cores read this layout.
    first, last = in_place[0] if in_place else groups[1]
    x = jax.tree.map(lambda y: lax.transpose(y, (*batch, *first, *last)), x)
    shape, start, middle = x.shape, len(batch), len(batch) + len(first)
    x = jax.tree.map(lambda y: _merged(_refined(y, shape, start, middle), start, middle), x)
    return x, (first == contracted) != k_comes_first


def _lies_so(order: _Dims, shape: Shape) -> bool:
    """Checks if a transposition to this order moves no data."""
    moved = [dim for dim in order if shape[dim] != 1]
    return moved == sorted(moved)


def _refined(factor: jax.Array, shape: Shape, start: int, middle: int) -> jax.Array:
    """Repeats the factors of an operand of ``shape`` until they fit its merged matrices.

    The dimensions from ``start`` to ``middle`` merge into one, and so do those after. Blocks stay
    blocks of the merged dimension if every element of the dimensions before the last one along
    which factors change has its own factor. There are no blocks along the batch. The operand itself
    stays as it is.
    """
    full = list(factor.shape)
    for dim in range(start):
        full[dim] = 1 if full[dim] == 1 else shape[dim]
    for group in (range(start, middle), range(middle, len(shape))):
        last = max((dim for dim in group if factor.shape[dim] not in (0, 1)), default=0)
        for dim in group:
            full[dim] = shape[dim] if dim < last else full[dim]
    return arrays.spread(factor, tuple(full))


def _merged(x: jax.Array, start: int, middle: int) -> jax.Array:
    """Merges all dimensions after the batch into those of a matrix."""
    groups = x.shape[start:middle], x.shape[middle:]
    return lax.reshape(x, (*x.shape[:start], *map(math.prod, groups)))
