"""Scaled operands as matrices: merges dimensions in any order to rows, columns and k."""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import jax
import numpy as np
from jax import lax

from jax_tcgemm.problem.strides import Shape
from jax_tcgemm.quantized import arrays

_Dims = tuple[int, ...]
DimensionNumbers = tuple[tuple[_Dims, _Dims], tuple[_Dims, _Dims]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scaled:
    """An operand with its scale and zero point, which have its rank."""

    value: jax.Array
    scale: jax.Array | None = None
    zero_point: jax.Array | None = None

    @staticmethod
    def of(x: Any) -> Scaled:
        """Returns the parts of a quantized operand; any other operand is its own value."""
        if not arrays.is_quantized(x):
            return Scaled(x)
        for name in ("scale", "zero_point"):
            if getattr(x, name) is not None:
                shape = getattr(x, name).shape
                arrays.check_divides(name, shape, "qvalue", x.qvalue.shape)
        return Scaled(x.qvalue, x.scale, x.zero_point)

    def map(self, function: Any) -> Scaled:
        """Applies a function to each part that is present."""
        others = (None if x is None else function(x) for x in (self.scale, self.zero_point))
        return Scaled(function(self.value), *others)

    def is_constant_along(self, dims: _Dims) -> bool:
        factors = [x for x in (self.scale, self.zero_point) if x is not None]
        return all(x.shape[dim] == 1 for x in factors for dim in dims)

    def dequantized(self, dtype: np.dtype) -> Scaled:
        if self.scale is None:
            return Scaled(self.value.astype(dtype))
        parts = arrays.Quantized(self.value, self.scale, self.zero_point)
        return Scaled(parts.dequantize(dtype))


def matrices(lhs: Scaled, rhs: Scaled, dims: DimensionNumbers) -> list[tuple[Scaled, bool]]:
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


def _matrix(x: Scaled, batch: _Dims, contracted: _Dims, k_comes_first: bool) -> tuple[Scaled, bool]:
    """Returns ``(*batch, m, k)``, or ``(*batch, k, m)``, and whether it is transposed.

    Args:
        x: the operand.
        batch: its batch dimensions.
        contracted: its contracted dimensions.
        k_comes_first: whether k comes first in a matrix that is not transposed.
    """
    free = tuple(d for d in range(x.value.ndim) if d not in (*batch, *contracted))
    groups = [(contracted, free), (free, contracted)]
    in_place = [pair for pair in groups if _lies_so((*batch, *pair[0], *pair[1]), x.value.shape)]
    # A copy has k last, because tensor cores read this layout.
    first, last = in_place[0] if in_place else groups[1]
    x = x.map(lambda y: lax.transpose(y, (*batch, *first, *last)))
    shape, start, middle = x.value.shape, len(batch), len(batch) + len(first)
    x = x.map(lambda y: _merged(_refined(y, shape, start, middle), start, middle))
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
        last = max((dim for dim in group if factor.shape[dim] > 1), default=0)
        for dim in group:
            full[dim] = shape[dim] if dim < last else full[dim]
    return arrays.spread(factor, tuple(full))


def _merged(x: jax.Array, start: int, middle: int) -> jax.Array:
    """Merges all dimensions after the batch into those of a matrix."""
    groups = x.shape[start:middle], x.shape[middle:]
    return lax.reshape(x, (*x.shape[:start], *map(math.prod, groups)))
