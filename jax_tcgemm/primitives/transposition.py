"""The transpose of the primitive: the cotangent of each operand of a linear gemm.

Let ``g`` be the cotangent of ``z = alpha * A @ B + beta * C + bias``. The cotangents of ``a`` and
``b`` are gemms of ``g`` with the other operand. Scales of rows and columns are multiplied into
``g`` first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from jax_tcgemm.lowering import reference
from jax_tcgemm.primitives.factor_cotangent import (
    Bind,
    Factor,
    check_linear,
    factor_cotangent,
)
from jax_tcgemm.problem.arithmetic import accumulator_dtype
from jax_tcgemm.problem.epilogue import Use
from jax_tcgemm.problem.spec import LARGE_MATRIX, GemmSpec
from jax_tcgemm.problem.strides import Axes, Operands, matrix_last, result_axes


def transpose(
    cotangents: Sequence[Any], x: Operands, spec: GemmSpec, bind: Bind
) -> dict[str, jax.Array]:
    """Returns the cotangents of the operands in which the results are linear, by name.

    Args:
        cotangents: the cotangents of the results, shape ``(*batch, m, n)``; not all are zero.
        x: the operands; each that is to be transposed is an ``UndefinedPrimal``.
        spec: the parameters of one product. Only linear parts are transposed. So there is no
            activation, except that of a derivative or one beside which a residual is transposed.
        bind: applies the primitive.
    """
    axes = spec.axes
    if spec.epilogue.names(Use.RESIDUAL):
        g = ad.instantiate_zeros(cotangents[0])
        return _addend_cotangents(g, x, spec, bind)
    if spec.epilogue.is_derivative:
        g = _through_activation(cotangents, x, spec)
        spec = spec.preactivations(config=None)
        x = spec.select(x)
    else:
        check_linear(spec.activation is None, f"activation={spec.activation!r}")
        (g,) = cotangents
    results = _scale_cotangents(g, x, spec, bind) | _addend_cotangents(g, x, spec, bind)
    a, b = Factor(x.a, axes.a), Factor(x.b, axes.b)
    if ad.is_undefined_primal(x.a):
        scaled = Factor(_scaled(g, x, spec), tuple(range(g.ndim)))
        results["a"] = factor_cotangent(scaled, a, b, x, spec, bind)
    if ad.is_undefined_primal(x.b):
        scaled = Factor(_scaled(g, x, spec), tuple(range(g.ndim))).swapped()
        # Z^T = B^T A^T: b is the left operand of the transposed product.
        results["b"] = factor_cotangent(scaled, b.swapped(), a.swapped(), x, spec, bind)
    return results


def _through_activation(cotangents: Sequence[Any], x: Operands, spec: GemmSpec) -> jax.Array:
    """Returns the cotangent of the product ``z`` of which the results are multiples."""
    dtype = accumulator_dtype(spec.out_dtype, spec.out_dtype, spec.out_dtype)
    wide = spec.replace(out_dtype=dtype)
    multiples = reference.cotangents(jnp.ones((), dtype), x, wide)
    terms = [
        cotangent.astype(dtype) * multiple
        for cotangent, multiple in zip(cotangents, multiples, strict=True)
        if type(cotangent) is not ad.Zero
    ]
    total = terms[0] if len(terms) == 1 else terms[0] + terms[1]
    return reference.convert(total, spec.out_dtype)


def _scaled(g: jax.Array, x: Operands, spec: GemmSpec) -> jax.Array:
    """Multiplies ``g`` by the scales of rows and columns.

    An epilogue cannot: the next product sums over the axis of a scale.
    """
    if x.row_scale is None and x.column_scale is None:
        return g
    dtype = accumulator_dtype(g.dtype, g.dtype, g.dtype)
    scales = Operands(None, None, row_scale=x.row_scale, column_scale=x.column_scale)
    scaled = g.astype(dtype)
    for factor in reference.factors(scales, spec.replace(alpha=1.0), dtype):
        scaled = factor * scaled
    return scaled.astype(g.dtype)


def _scale_cotangents(
    g: jax.Array, x: Operands, spec: GemmSpec, bind: Bind
) -> dict[str, jax.Array]:
    """Returns the cotangents of ``alpha`` and the scales: sums of ``g`` times the product."""
    names = spec.epilogue.names(Use.SCALE)
    linear = [name for name in names if ad.is_undefined_primal(getattr(x, name))]
    if not linear:
        return {}
    dtype = accumulator_dtype(x.a.dtype, x.b.dtype, spec.out_dtype)
    (product,) = bind(Operands(x.a, x.b), spec.product(out_dtype=dtype))
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
    """Returns the cotangents of ``c``, ``bias`` and ``beta``, which involve no product."""
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
    """Sums over the axes that an operand lacks, and leaves the rest in its order."""
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
    """Sums a matrix of 16-bit numbers over its rows in float32, and rounds once.

    On a GPU, a kernel for few rows computes a product with ones: XLA's reduction reads at a third
    of the memory bandwidth (lab/README.md).
    """

    def by_product(x: jax.Array) -> jax.Array:
        ones = jnp.ones((1, x.shape[0]), x.dtype)
        spec = GemmSpec(Operands((0, 1), (0, 1)), x.dtype, lax.DotAlgorithmPreset.DEFAULT)
        (sums,) = bind(Operands(ones, x), spec)
        return sums[0]

    def by_sum(x: jax.Array) -> jax.Array:
        return jnp.sum(x, axis=0, dtype=jnp.float32).astype(x.dtype)

    return lax.platform_dependent(x, cuda=by_product, default=by_sum)
