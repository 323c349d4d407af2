"""The transpose of the primitive: the cotangent of each operand of a linear gemm.

With ``z = alpha * A @ B + beta * C + bias`` and the cotangent ``g`` of ``z``, those of ``a`` and
``b`` are gemms of ``g`` with the other operand. A gemm writes its result row-major, so which of
``g @ B^T`` and ``B @ g^T`` is formed decides that it comes out in the operand's own axis order.
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
from jax.interpreters import ad

from jax_tcgemm import reference
from jax_tcgemm.spec import GemmSpec, accumulator_dtype
from jax_tcgemm.strides import Axes, Operands, matrix_last, merge

Bind = Callable[[Operands, GemmSpec], list[jax.Array]]


@dataclasses.dataclass(frozen=True)
class _Factor:
    """An operand of a product: an array, and where its batch and two matrix roles lie."""

    array: Any
    axes: Axes

    def swapped(self) -> _Factor:
        """Returns the transposed matrix."""
        *batch, rows, columns = self.axes
        return _Factor(self.array, (*batch, columns, rows))


def transpose_operands(g: jax.Array, x: Operands, spec: GemmSpec, bind: Bind) -> list[Any]:
    """Returns the cotangents of the primitive's operands, ``None`` for those that are not linear.

    Args:
        g: the cotangent of the result, shape ``(*batch, m, n)``.
        x: the operands; each that is to be transposed is an ``UndefinedPrimal``.
        spec: the primitive's parameters; linear, so there is no activation.
        bind: applies the primitive.
    """
    assert spec.activation is None, spec
    full = _Factor(g, tuple(range(g.ndim)))
    cotangents: dict[str, Any] = {}
    if ad.is_undefined_primal(x.a):
        left = _Factor(x.a, spec.axes.a)
        cotangents["a"] = _left_cotangent(full, left, _Factor(x.b, spec.axes.b), x, spec, bind)
    if ad.is_undefined_primal(x.b):
        # Z^T = B^T A^T: b is the left operand of the transposed product.
        left = _Factor(x.b, spec.axes.b).swapped()
        right = _Factor(x.a, spec.axes.a).swapped()
        cotangents["b"] = _left_cotangent(full.swapped(), left, right, x, spec, bind)
    if ad.is_undefined_primal(x.alpha):
        cotangents["alpha"] = _alpha_cotangent(g, x, spec, bind)
    cotangents |= _addend_cotangents(g, x, spec)
    return [cotangents.get(name) for name, axes in spec.axes._asdict().items() if axes is not None]


def _left_cotangent(
    g: _Factor, left: _Factor, right: _Factor, x: Operands, spec: GemmSpec, bind: Bind
) -> jax.Array:
    """Returns ``alpha * g @ right^T``, summed over the batch dimensions that ``left`` lacks.

    Args:
        g: the cotangent, roles ``(*batch, m, n)``.
        left: what the cotangent is of, roles ``(*batch, m, k)``.
        right: the other operand, roles ``(*batch, k, n)``.
        x: all operands, for ``alpha``.
        spec: the parameters of the gemm that is transposed.
        bind: applies the primitive.
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
            left = _Factor(left.array, left.axes[:i] + left.axes[i + 1 :])
            alpha_axes = alpha_axes and alpha_axes[:i] + alpha_axes[i + 1 :]
            batch.pop()
    m, k = left.axes[-2:]
    assert m is not None
    assert k is not None
    # The result's batch: what is summed over, then what left has, in the order left has it.
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
    (result,) = bind(Operands(first.array, second.array, alpha=x.alpha), product)
    result = jnp.sum(result, axis=tuple(range(len(summed)))) if summed else result
    source = [*(left.axes[i] for i in kept), *sorted((m, k))]
    return lax.transpose(result, np.argsort(source)).astype(aval.dtype)


def _fold(
    g: _Factor, right: _Factor, i: int, batch_ndim: int, partial_sums: int
) -> tuple[_Factor, _Factor] | None:
    """Makes batch dimension ``i`` part of the contracted ``n``.

    So the weight gradient of ``x (B, T, k) @ w (k, n)`` is one product over all ``B * T`` rows. A
    factor in which the two do not lie side by side is copied, unless more elements would move than
    there are ``partial_sums``, which are written one by one and added up otherwise.
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
        folded.append(_Factor(lax.reshape(factor.array, shape), axes))
    return folded[0], folded[1]


def _side_by_side(factor: _Factor, outer: int, inner: int) -> _Factor:
    """Returns a copy in which role ``outer`` lies right before role ``inner``."""
    moved, stays = factor.axes[outer], factor.axes[inner]
    assert moved is not None
    assert stays is not None
    order = [axis for axis in range(factor.array.ndim) if axis != moved]
    order.insert(order.index(stays), moved)
    axes = tuple(None if axis is None else order.index(axis) for axis in factor.axes)
    return _Factor(lax.transpose(factor.array, order), axes)


def _alpha_cotangent(g: jax.Array, x: Operands, spec: GemmSpec, bind: Bind) -> jax.Array:
    axes = Operands(spec.axes.a, spec.axes.b)
    dtype = accumulator_dtype(x.a.dtype, x.b.dtype, spec.out_dtype)
    (product,) = bind(Operands(x.a, x.b), spec.linear(axes=axes, out_dtype=dtype, alpha=1.0))
    return _reduced(g.astype(dtype) * product, (*spec.axes.alpha, None, None), x.alpha.aval.dtype)


def _addend_cotangents(g: jax.Array, x: Operands, spec: GemmSpec) -> dict[str, jax.Array]:
    """Returns the cotangents of ``c``, ``bias`` and ``beta``, which no product takes part in."""
    dtype = accumulator_dtype(spec.out_dtype, spec.out_dtype, spec.out_dtype)
    cotangents = {}
    if ad.is_undefined_primal(x.c):
        beta = reference.scale(x.beta, spec.axes.beta, spec.beta, dtype)
        scaled = g if beta is None else beta * g.astype(dtype)
        cotangents["c"] = _reduced(scaled, spec.axes.c, x.c.aval.dtype)
    if ad.is_undefined_primal(x.bias):
        axes = (*spec.axes.bias[:-1], None, spec.axes.bias[-1])
        cotangents["bias"] = _reduced(g, axes, x.bias.aval.dtype)
    if ad.is_undefined_primal(x.beta):
        c = reference.aligned(x.c, spec.axes.c).astype(dtype)
        axes = (*spec.axes.beta, None, None)
        cotangents["beta"] = _reduced(g.astype(dtype) * c, axes, x.beta.aval.dtype)
    return cotangents


def _reduced(x: jax.Array, axes: Axes, dtype: np.dtype) -> jax.Array:
    """Sums over the axes that an operand lacks, and leaves the rest in the operand's order."""
    missing = tuple(i for i, axis in enumerate(axes) if axis is None)
    if missing:
        x = jnp.sum(x, axis=missing, dtype=accumulator_dtype(x.dtype, x.dtype, x.dtype))
    return lax.transpose(x, np.argsort(matrix_last(axes))).astype(dtype)
