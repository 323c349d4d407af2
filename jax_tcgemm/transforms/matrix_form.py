"""Maps ``dot_general`` to ``gemm``, and ``ragged_dot_general`` to ``ragged_dot``."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
from jax import lax

_Dims = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class MatrixForm:
    """How the operands of a ``dot_general`` become those of ``gemm``, without a copy.

    Attributes:
        a_shape: the shape of ``a``: ``(..., m, k)``, or ``(..., k, m)`` with ``transpose_a``.
        b_shape: the shape of ``b``: ``(..., k, n)``, or ``(..., n, k)`` with ``transpose_b``.
        transpose_a: whether ``a`` holds the transpose.
        transpose_b: whether ``b`` holds the transpose.
    """

    a_shape: tuple[int, ...]
    b_shape: tuple[int, ...]
    transpose_a: bool
    transpose_b: bool

    def factors(self, lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns ``a`` and ``b``."""
        return lax.reshape(lhs, self.a_shape), lax.reshape(rhs, self.b_shape)


@functools.lru_cache(maxsize=1024)
def matrix_form(lhs: _Dims, rhs: _Dims, dims: Any) -> MatrixForm | None:
    """Returns how ``gemm`` computes a ``dot_general``; ``None`` if that needs a copy.

    Args:
        lhs: the shape of the first operand.
        rhs: the shape of the second operand.
        dims: the dimension numbers of the ``dot_general``.
    """
    (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = dims
    batch = len(lhs_batch)
    leading = tuple(range(batch))
    if tuple(lhs_batch) != leading or tuple(rhs_batch) != leading:
        return None
    pairs = sorted(zip(lhs_contracted, rhs_contracted, strict=True))
    of_a = _merged(lhs, tuple(i for i, _ in pairs), batch)
    of_b = _merged(rhs, tuple(j for _, j in pairs), batch)
    if of_a is None or of_b is None:
        return None
    (a_free, k, a_leads), (b_free, _, b_leads) = of_a, of_b
    if len(b_free) != 1 or not a_free or (len(a_free) > 1 and (a_leads or batch)):
        return None
    lead = lhs[:batch]
    a_shape = (*lead, k, *a_free) if a_leads else (*lead, *a_free, k)
    b_shape = (*lead, k, *b_free) if b_leads else (*lead, *b_free, k)
    return MatrixForm(a_shape, b_shape, a_leads, not b_leads)


def _merged(shape: _Dims, contracted: _Dims, batch: int) -> tuple[_Dims, int, bool] | None:
    """Returns the free extents, the contraction extent, and whether the latter comes first."""
    count, rank = len(contracted), len(shape)
    k = math.prod(shape[i] for i in contracted)
    if not count:
        return None
    if contracted == tuple(range(rank - count, rank)):
        return shape[batch : rank - count], k, False
    if contracted == tuple(range(batch, batch + count)):
        return shape[batch + count :], k, True
    return None


@dataclasses.dataclass(frozen=True)
class RaggedForm:
    """How this package computes a ``ragged_dot_general`` as a product over groups of rows.

    Attributes:
        contracts_groups: whether it contracts over the rows of each group.
        transpose_rhs: if it does not contract over them, whether ``rhs`` is ``(g, n, k)``.
    """

    contracts_groups: bool
    transpose_rhs: bool = False


def ragged_form(params: Mapping[str, Any]) -> RaggedForm | None:
    """Returns the form of a ``ragged_dot_general``; ``None`` if this package does not support it.

    Args:
        params: the parameters of the primitive.
    """
    numbers = params["ragged_dot_dimension_numbers"]
    is_plain = params["group_offset"] is None and params.get("out_sharding") is None
    contracted, batch = numbers.dot_dimension_numbers
    if not is_plain or any(batch) or tuple(numbers.lhs_ragged_dimensions) != (0,):
        return None
    found = (*map(tuple, contracted), tuple(numbers.rhs_group_dimensions))
    return {
        ((1,), (1,), (0,)): RaggedForm(False),
        ((1,), (2,), (0,)): RaggedForm(False, True),
        ((0,), (0,), ()): RaggedForm(True),
    }.get(found)
