"""The forward derivative of a gemm: the tangents of its pre-activations, and of ``D`` from them.

The fused gemm returns the pre-activations beside ``D``, rounded like ``D``. Their tangents are
linear gemms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_tcgemm.lowering import reference
from jax_tcgemm.primitives import gated, ragged
from jax_tcgemm.primitives.epilogue_derivative import activation_tangent
from jax_tcgemm.primitives.factor_cotangent import Bind
from jax_tcgemm.problem.arithmetic import accumulator_dtype
from jax_tcgemm.problem.epilogue import Use
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Operands


def linear_tangents(
    x: Operands, dx: Operands, spec: GemmSpec, bind: Bind
) -> list[jax.Array | None]:
    """Returns the tangent of each pre-activation, ``None`` for zero.

    Args:
        x: the operands.
        dx: their tangents, ``None`` for zero.
        spec: the primitive's parameters; ``c``, if present, is added to the product.
        bind: applies the primitive.
    """
    parts = gated.tangent_terms if spec.is_gated else _tangent_terms
    parts = ragged.tangent_terms if spec.is_grouped else parts
    return [_total(terms, x, spec) for terms in parts(x, dx, spec, bind)]


def _tangent_terms(x: Operands, dx: Operands, spec: GemmSpec, bind: Bind) -> list[list[jax.Array]]:
    """Returns the terms of the one pre-activation: products that each add the one before."""
    factors = _factors(spec)
    total = None
    for name in factors:
        factor = getattr(dx, name)
        if factor is None:
            continue
        operands = Operands(None, None)._replace(**{key: getattr(x, key) for key in factors})
        operands = operands._replace(**{name: factor})
        if total is None:  # the first product also adds the tangents of c and bias
            beta = None if dx.c is None else x.beta
            operands = operands._replace(c=dx.c, bias=dx.bias, beta=beta)
            constant, c_axes = spec.beta, spec.axes.c
        else:
            operands = operands._replace(c=total)
            constant, c_axes = 1.0, tuple(range(spec.batch_ndim + 2))
        pairs = zip(operands, spec.axes._replace(c=c_axes), strict=True)
        axes = Operands(*(None if operand is None else present for operand, present in pairs))
        product = spec.linear(axes=axes, beta=constant, overwrite_c=total is not None)
        (total,) = bind(operands, product)
    if total is None:
        return [_addend_tangents(x, dx, spec)]
    return [[total, *_addend_tangents(x, dx._replace(c=None, bias=None), spec)]]


def _factors(spec: GemmSpec) -> tuple[str, ...]:
    """Returns the names of the operands in each of which the product is linear."""
    return ("a", "b", *spec.epilogue.names(Use.SCALE))


def _addend_tangents(x: Operands, dx: Operands, spec: GemmSpec) -> list[jax.Array]:
    """Returns the sum of the elementwise terms of the tangent of ``beta * C + bias``, if any."""
    dtype = accumulator_dtype(x.a.dtype, x.b.dtype, spec.out_dtype)
    terms = reference.addends(Operands(None, None, c=dx.c, bias=dx.bias, beta=x.beta), spec, dtype)
    if dx.beta is not None:
        terms += reference.addends(Operands(None, None, c=x.c, beta=dx.beta), spec, dtype)
    return [sum(terms[1:], terms[0])] if terms else []


def _total(terms: Sequence[jax.Array | None], x: Operands, spec: GemmSpec) -> jax.Array | None:
    """Adds terms that broadcast to the result and rounds once; ``None`` without terms."""
    present = [term for term in terms if term is not None]
    if not present:
        return None
    if len(present) > 1:
        dtype = accumulator_dtype(x.a.dtype, x.b.dtype, spec.out_dtype)
        present = [term.astype(dtype) for term in present]
    shapes = Operands(*(None if operand is None else jnp.shape(operand) for operand in x))
    total = jnp.broadcast_to(sum(present[1:], present[0]), spec.result_shape(shapes))
    return reference.convert(total, spec.out_dtype)


def result_tangents(
    x: Operands, dx: Operands, spec: GemmSpec, saved: Sequence[jax.Array], bind: Bind
) -> list[jax.Array | None]:
    """Returns the tangents of ``D`` and the pre-activations, ``None`` for zero.

    The derivative of ``d = f(z) + r`` is ``d' = f'(z) z' + r'``. That of ``d = f(g) u`` is
    ``d' = f'(g) g' u + f(g) u'``.

    Args:
        x: the operands.
        dx: their tangents, ``None`` for zero.
        spec: the primitive's parameters.
        saved: the pre-activations.
        bind: applies the primitive.
    """
    if spec.is_gated:
        pair = linear_tangents(x, dx, spec, bind)
        if all(t is None for t in pair):
            return [None, *pair]
        return [gated.product_tangent(spec.activation, *saved, *pair), *pair]
    terms = []
    if spec.epilogue.names(Use.RESIDUAL):
        terms = _addend_tangents(x, dx._replace(bias=None), spec)
    inner = spec.preactivations()
    dx, bias = _without_bias(inner.select(dx), spec)
    (dz,), dd = linear_tangents(inner.select(x), dx, inner, bind), None
    if dz is not None:
        dd = activation_tangent(spec.activation, saved[0], dz, bias)
    return [_total([dd, *terms], x, spec), dz]


def _without_bias(dx: Operands, spec: GemmSpec) -> tuple[Operands, jax.Array | None]:
    """Removes the bias's tangent if the step after the product can add it.

    Its transpose is then the sum that one kernel forms together with ``f'(z)`` times a cotangent.
    This needs a product and a bias of one row, and ``z'`` itself must not be requested.
    """
    has_product = any(getattr(dx, name) is not None for name in _factors(spec))
    is_row = dx.bias is not None and dx.bias.ndim == 1 and spec.axes.bias[-1] == 0
    _, wants_preactivation = spec.epilogue.results
    if not is_row or not has_product or wants_preactivation:
        return dx, None
    return dx._replace(bias=None), dx.bias


def tangents_by_parts(
    x: Operands, dx: Operands, spec: GemmSpec, bind: Bind
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Derives a gemm that is itself part of a derivative, as the composition of its pieces."""
    present = [t is not None for t in dx]

    def composed(*varied: Any) -> list[jax.Array]:
        values = iter(varied)
        y = Operands(*(next(values) if p else o for p, o in zip(present, x, strict=True)))
        dtype = accumulator_dtype(y.a.dtype, y.b.dtype, spec.out_dtype)
        inner = spec.preactivations(out_dtype=dtype, config=None)
        return reference.finished(bind(inner.select(y), inner), y, spec)

    varied = [operand for operand, p in zip(x, present, strict=True) if p]
    return jax.jvp(composed, varied, [t for t in dx if t is not None])
