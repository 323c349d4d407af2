"""The transpose of the primitive: the cotangent of each operand of a linear gemm.

With ``z = alpha * A @ B + beta * C + bias`` and the cotangent ``g`` of ``z``, those of ``a`` and
``b`` are gemms of ``g`` with the other operand; scales of rows and columns go into ``g`` first. A
gemm writes its result row-major, so which of ``g @ B^T`` and ``B @ g^T`` is formed decides that it
comes out in the operand's own axis order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from jax_tcgemm.lowering import reference
from jax_tcgemm.problem.arithmetic import accumulator_dtype
from jax_tcgemm.problem.spec import LARGE_MATRIX, GatedSpec, GemmSpec
from jax_tcgemm.problem.strides import Axes, Operands, matrix_last, merge, result_axes

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


def transpose_operands(
    cotangents: Sequence[Any], x: Operands, spec: GemmSpec, bind: Bind
) -> list[Any]:
    """Returns the cotangents of the primitive's operands, ``None`` for those that are not linear.

    Args:
        cotangents: those of the results, shape ``(*batch, m, n)``; not all are zero.
        x: the operands; each that is to be transposed is an ``UndefinedPrimal``.
        spec: the primitive's parameters. What is transposed is linear: there is no activation but
            that of a derivative, or one beside which a residual is transposed.
        bind: applies the primitive.
    """
    axes = spec.axes
    if spec.c_role == "residual":
        g = ad.instantiate_zeros(cotangents[0])
        results = _addend_cotangents(g, x, spec, bind)
        return [results.get(name) for name, axis in axes._asdict().items() if axis is not None]
    if spec.is_derivative:
        g = _through_activation(cotangents, x, spec)
        x = x._replace(c=None, c2=None)
        spec = spec.linear(axes=axes._replace(c=None, c2=None))
    else:
        assert spec.activation is None, spec
        (g,) = cotangents
    results = _scale_cotangents(g, x, spec, bind) | _addend_cotangents(g, x, spec, bind)
    a, b = _Factor(x.a, axes.a), _Factor(x.b, axes.b)
    if ad.is_undefined_primal(x.a):
        scaled = _Factor(_scaled(g, x, spec), tuple(range(g.ndim)))
        results["a"] = _left_cotangent(scaled, a, b, x, spec, bind)
    if ad.is_undefined_primal(x.b):
        scaled = _Factor(_scaled(g, x, spec), tuple(range(g.ndim))).swapped()
        # Z^T = B^T A^T: b is the left operand of the transposed product.
        results["b"] = _left_cotangent(scaled, b.swapped(), a.swapped(), x, spec, bind)
    return [results.get(name) for name, present in axes._asdict().items() if present is not None]


def transpose_pair(
    cotangents: Sequence[Any], x: Operands, spec: GatedSpec, bind: Bind
) -> jax.Array:
    """Returns the cotangent of ``a`` in ``G = A @ B``, ``U = A @ B2``.

    For two weights the second product takes the first along as its C; for a packed one the sum runs
    over the columns of both at once.

    Args:
        cotangents: those of ``G`` and ``U``, shape ``(*batch, m, n)``; at most one is zero.
        x: the operands; ``a`` is an ``UndefinedPrimal``.
        spec: the parameters of the gated primitive.
        bind: applies the primitive of the plain product.
    """
    axes = spec.axes

    def product(g: jax.Array, b: _Factor, addend: jax.Array | None = None) -> jax.Array:
        full, a = _Factor(g, tuple(range(g.ndim))), _Factor(x.a, axes.a)
        plain = Operands(x.a, b.array)
        return _left_cotangent(full, a, b, plain, spec.plain(), bind, addend)

    if spec.packed:
        both = jnp.concatenate([ad.instantiate_zeros(g) for g in cotangents], axis=-1)
        return product(both, _Factor(x.b, axes.b))
    total = None
    weights = (_Factor(x.b, axes.b), _Factor(x.b2, axes.b2))
    for g, weight in zip(cotangents, weights, strict=True):
        if type(g) is not ad.Zero:
            total = product(g, weight, total)
    assert total is not None, "both cotangents are zero"
    return total


def _through_activation(cotangents: Sequence[Any], x: Operands, spec: GemmSpec) -> jax.Array:
    """Returns the cotangent of the product ``z`` of which the results are multiples."""
    dtype = accumulator_dtype(spec.out_dtype, spec.out_dtype, spec.out_dtype)
    wide = dataclasses.replace(spec, out_dtype=dtype)
    multiples = reference.cotangents(jnp.ones((), dtype), x, wide)
    terms = [
        cotangent.astype(dtype) * multiple
        for cotangent, multiple in zip(cotangents, multiples, strict=True)
        if type(cotangent) is not ad.Zero
    ]
    total = terms[0] if len(terms) == 1 else terms[0] + terms[1]
    return reference.convert(total, spec.out_dtype)


def _scaled(g: jax.Array, x: Operands, spec: GemmSpec) -> jax.Array:
    """Multiplies by the scales: along the axis that a product sums over, no epilogue can."""
    if x.row_scale is None and x.column_scale is None:
        return g
    dtype = accumulator_dtype(g.dtype, g.dtype, g.dtype)
    scales = Operands(None, None, row_scale=x.row_scale, column_scale=x.column_scale)
    scaled = g.astype(dtype)
    for factor in reference.factors(scales, dataclasses.replace(spec, alpha=1.0), dtype):
        scaled = factor * scaled
    return scaled.astype(g.dtype)


def _left_cotangent(
    g: _Factor,
    left: _Factor,
    right: _Factor,
    x: Operands,
    spec: GemmSpec,
    bind: Bind,
    addend: jax.Array | None = None,
) -> jax.Array:
    """Returns ``alpha * g @ right^T``, summed over the batch dimensions that ``left`` lacks.

    Args:
        g: the cotangent, roles ``(*batch, m, n)``.
        left: what the cotangent is of, roles ``(*batch, m, k)``.
        right: the other operand, roles ``(*batch, k, n)``.
        x: all operands, for ``alpha``.
        spec: the parameters of the gemm that is transposed.
        bind: applies the primitive.
        addend: what is added to it, such as another part of the same cotangent.
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
    # Where the result's axes are in what left is.
    source: Any = (*(left.axes[i] for i in kept), *sorted((m, k)))
    operands = Operands(first.array, second.array, alpha=x.alpha)
    if addend is not None and not summed:
        operands = operands._replace(c=addend)
        axes = product.axes._replace(c=source)
        product = dataclasses.replace(product, axes=axes, overwrite_c=True)
    (result,) = bind(operands, product)
    result = jnp.sum(result, axis=tuple(range(len(summed)))) if summed else result
    result = reference.convert(lax.transpose(result, np.argsort(source)), aval.dtype)
    return result + addend if addend is not None and summed else result


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


def _scale_cotangents(
    g: jax.Array, x: Operands, spec: GemmSpec, bind: Bind
) -> dict[str, jax.Array]:
    """Returns the cotangents of ``alpha`` and the scales: sums of ``g`` times the product."""
    names = ("alpha", "row_scale", "column_scale")
    linear = [name for name in names if ad.is_undefined_primal(getattr(x, name))]
    if not linear:
        return {}
    axes = Operands(spec.axes.a, spec.axes.b)
    dtype = accumulator_dtype(x.a.dtype, x.b.dtype, spec.out_dtype)
    (product,) = bind(Operands(x.a, x.b), spec.linear(axes=axes, out_dtype=dtype, alpha=1.0))
    product = g.astype(dtype) * product
    for factor in reference.factors(x._replace(**dict.fromkeys(linear)), spec, dtype):
        product = factor * product
    return {
        name: _reduced(
            product, result_axes(name, getattr(spec.axes, name)), getattr(x, name).aval.dtype, bind
        )
        for name in linear
    }


def _addend_cotangents(
    g: jax.Array, x: Operands, spec: GemmSpec, bind: Bind
) -> dict[str, jax.Array]:
    """Returns the cotangents of ``c``, ``bias`` and ``beta``, which no product takes part in."""
    dtype = accumulator_dtype(spec.out_dtype, spec.out_dtype, spec.out_dtype)
    terms = {}
    if ad.is_undefined_primal(x.c):
        beta = reference.beta_factor(x, spec, dtype)
        terms["c"] = g if beta is None else beta * g.astype(dtype)
    if ad.is_undefined_primal(x.bias):
        terms["bias"] = g
    if ad.is_undefined_primal(x.beta):
        terms["beta"] = g.astype(dtype) * reference.over_result("c", x, spec, dtype)
    return {
        name: _reduced(
            term, result_axes(name, getattr(spec.axes, name)), getattr(x, name).aval.dtype, bind
        )
        for name, term in terms.items()
    }


def _reduced(x: jax.Array, axes: Axes, dtype: np.dtype, bind: Bind) -> jax.Array:
    """Sums over the axes that an operand lacks, and leaves the rest in the operand's order."""
    missing = tuple(i for i, axis in enumerate(axes) if axis is None)
    is_sized = all(isinstance(extent, int) for extent in x.shape)
    if (
        missing == tuple(range(x.ndim - 1))
        and x.dtype == dtype
        and dtype in (jnp.bfloat16, jnp.float16)
        and is_sized
        and x.size >= LARGE_MATRIX
    ):
        return _column_sums(x.reshape(-1, x.shape[-1]), bind)
    if missing:
        x = jnp.sum(x, axis=missing, dtype=accumulator_dtype(x.dtype, x.dtype, x.dtype))
    return reference.convert(lax.transpose(x, np.argsort(matrix_last(axes))), dtype)


def _column_sums(x: jax.Array, bind: Bind) -> jax.Array:
    """Sums a matrix of 16-bit numbers over its rows, in float32, and rounds once.

    On a GPU by a kernel for few rows, as a product with ones: XLA's reduction reads a third of what
    memory gives (docs/performance.md).
    """

    def by_product(x: jax.Array) -> jax.Array:
        ones = jnp.ones((1, x.shape[0]), x.dtype)
        spec = GemmSpec(Operands((0, 1), (0, 1)), x.dtype, lax.DotAlgorithmPreset.DEFAULT)
        (sums,) = bind(Operands(ones, x), spec)
        return sums[0]

    def by_sum(x: jax.Array) -> jax.Array:
        return jnp.sum(x, axis=0, dtype=jnp.float32).astype(x.dtype)

    return lax.platform_dependent(x, cuda=by_product, default=by_sum)
