"""The cotangent of one factor of a product: the result's cotangent times the other factor.

A gemm writes its result row-major. The choice between ``g @ B^T`` and ``B @ g^T`` makes the result
come out in the factor's own axis order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm.lowering import reference
from jax_tcgemm.problem.arithmetic import accumulator_dtype
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Axes, Operands, merge

Bind = Callable[[Operands, GemmSpec], list[jax.Array]]


@dataclasses.dataclass(frozen=True)
class Factor:
    """An operand of a product: an array, and the axes of its batch and two matrix roles."""

    array: Any
    axes: Axes

    def swapped(self) -> Factor:
        """Returns the transposed matrix."""
        *batch, rows, columns = self.axes
        return Factor(self.array, (*batch, columns, rows))


def factor_cotangent(
    g: Factor,
    left: Factor,
    right: Factor,
    x: Operands,
    spec: GemmSpec,
    bind: Bind,
    addend: jax.Array | None = None,
) -> jax.Array:
    """Returns ``alpha * g @ right^T``, summed over the batch dimensions that ``left`` lacks.

    Args:
        g: the cotangent of the result, roles ``(*batch, m, n)``.
        left: the factor whose cotangent is returned, roles ``(*batch, m, k)``.
        right: the other factor, roles ``(*batch, k, n)``.
        x: all operands, for ``alpha``.
        spec: the parameters of the gemm that is transposed.
        bind: applies the primitive.
        addend: a term to add, such as another part of the same cotangent.
    """
    aval = left.array.aval
    batch = list(range(spec.batch_ndim))
    alpha_axes = spec.axes.alpha
    for i in reversed(batch.copy()):
        is_constant = alpha_axes is None or alpha_axes[i] is None
        if left.axes[i] is not None or not is_constant:
            continue
        partial_sums = g.array.shape[g.axes[i]] * math.prod(aval.shape)
        if folded := _fold(g, right, i, len(batch), partial_sums):
            g, right = folded
            left = Factor(left.array, left.axes[:i] + left.axes[i + 1 :])
            alpha_axes = alpha_axes and alpha_axes[:i] + alpha_axes[i + 1 :]
            batch.pop()
    m, k = left.axes[-2:]
    assert m is not None
    assert k is not None
    # The result's batch: the dimensions to sum over, then those of left in their order in left.
    summed = [i for i in batch if left.axes[i] is None]
    present = ((axis, i) for i, axis in enumerate(left.axes[:-2]) if axis is not None)
    kept = [i for _, i in sorted(present)]
    first, second = (g, right.swapped()) if m < k else (right, g.swapped())

    def reordered(axes: Axes) -> Axes:
        return (*(axes[i] for i in summed + kept), *axes[len(batch) :])

    dtype = accumulator_dtype(aval.dtype, aval.dtype, aval.dtype) if summed else aval.dtype
    product = spec.linear(
        axes=Operands(
            reordered(first.axes),
            reordered(second.axes),
            alpha=None if alpha_axes is None else reordered(alpha_axes),
        ),
        out_dtype=dtype,
        beta=1.0,
    )
    # The axes in left of the result's axes.
    source: Any = (*(left.axes[i] for i in kept), *sorted((m, k)))
    operands = Operands(first.array, second.array, alpha=x.alpha)
    if addend is not None and not summed:
        operands = operands._replace(c=addend)
        axes = product.axes._replace(c=source)
        product = product.replace(axes=axes, overwrite_c=True)
    (result,) = bind(operands, product)
    result = jnp.sum(result, axis=tuple(range(len(summed)))) if summed else result
    result = reference.convert(lax.transpose(result, np.argsort(source)), aval.dtype)
    return result + addend if addend is not None and summed else result


def _fold(
    g: Factor, right: Factor, i: int, batch_ndim: int, partial_sums: int
) -> tuple[Factor, Factor] | None:
    """Makes batch dimension ``i`` part of the contracted ``n``, or returns ``None``.

    So the weight gradient of ``x (B, T, k) @ w (k, n)`` is one product over all ``B * T`` rows. A
    factor in which the two dimensions are not adjacent is copied. Exception: there is no fold if
    the copies move more elements than ``partial_sums``. Those are then written one by one and added
    up.
    """
    n = batch_ndim + 1
    apart = [x.array.size for x in (g, right) if merge(x.axes, x.array.shape, i, n) is None]
    if apart:
        spared = partial_sums - sum(apart)
        if not isinstance(spared, int) or spared < 0:  # symbolic shapes do not compare
            return None
    folded = []
    for factor in (g, right):
        merged = merge(factor.axes, factor.array.shape, i, n)
        if merged is None:
            factor = _side_by_side(factor, i, n)
            merged = merge(factor.axes, factor.array.shape, i, n)
        assert merged is not None
        axes, shape = merged
        folded.append(Factor(lax.reshape(factor.array, shape), axes))
    return folded[0], folded[1]


def _side_by_side(factor: Factor, outer: int, inner: int) -> Factor:
    """Returns a copy in which role ``outer`` lies directly before role ``inner``."""
    moved, stays = factor.axes[outer], factor.axes[inner]
    assert moved is not None
    assert stays is not None
    order = [axis for axis in range(factor.array.ndim) if axis != moved]
    order.insert(order.index(stays), moved)
    axes = tuple(None if axis is None else order.index(axis) for axis in factor.axes)
    return Factor(lax.transpose(factor.array, order), axes)


def check_linear(is_linear: bool, what: str) -> None:
    """Checks that a product is linear in what a user transposes.

    Raises:
        NotImplementedError: it is not, as JAX raises for its own functions.
    """
    if not is_linear:
        raise NotImplementedError(
            f"Transpose rule (for reverse-mode differentiation) for {what} not implemented"
        )
