"""Rules specific to a gated product ``D = activation(G) * U``: its derivative and parts.

``G = A @ B + bias`` and ``U = A @ B2 + bias2``. Any of ``D``, ``G`` and ``U`` may be results: the
derivative requests all three from the kernel in one pass. ``G`` and ``U`` without ``D`` are
ordinary products; the tangent of ``A`` goes through them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jax_tcgemm.lowering import reference
from jax_tcgemm.primitives.factor_cotangent import (
    Bind,
    Factor,
    check_linear,
    factor_cotangent,
)
from jax_tcgemm.problem.activations import Activation, resolve
from jax_tcgemm.problem.arithmetic import accumulator_dtype, common_dtype
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Operands

# Forward derivative


# Rematerialized, so that the reverse pass keeps only g and u.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=0)
def product_tangent(
    activation: str | Activation | None,
    g: jax.Array,
    u: jax.Array,
    dg: jax.Array | None,
    du: jax.Array | None,
) -> jax.Array:
    """Returns ``f'(g) dg u + f(g) du`` in the type of ``g``, rounded once.

    A tangent of ``None`` is zero.
    """
    dtype = accumulator_dtype(g.dtype, g.dtype, g.dtype)
    activated = resolve(activation).reference
    f, df = activated(g.astype(dtype)), None
    terms = []
    if dg is not None:
        f, df = jax.jvp(activated, (g.astype(dtype),), (dg.astype(dtype),))
        terms.append(df * u.astype(dtype))
    if du is not None:
        terms.append(f * du.astype(dtype))
    return sum(terms[1:], terms[0]).astype(g.dtype)


def tangent_terms(
    x: Operands, dx: Operands, spec: GemmSpec, bind: Bind
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns the terms of the tangents of ``G`` and ``U``; arguments as in ``linear_tangents``."""
    terms: tuple[list[jax.Array], list[jax.Array]] = ([], [])
    if dx.a is not None:
        pair = bind(Operands(dx.a, x.b, b2=x.b2), spec.accumulators())
        for part, term in zip(terms, pair, strict=True):
            part.append(term)
    if spec.packed and dx.b is not None:
        (both,) = bind(Operands(x.a, dx.b), spec.product())
        for part, term in zip(terms, reference.halves(both), strict=True):
            part.append(term)
    elif not spec.packed:
        for part, name in zip(terms, ("b", "b2"), strict=True):
            weight = getattr(dx, name)
            if weight is not None:
                axes = Operands(spec.axes.a, getattr(spec.axes, name))
                part += bind(Operands(x.a, weight), spec.product(axes=axes))
    dtype = accumulator_dtype(x.a.dtype, x.b.dtype, spec.out_dtype)
    for part, name in zip(terms, ("bias", "bias2"), strict=True):
        if getattr(dx, name) is not None:
            part.append(reference.over_result(name, dx, spec, dtype))
    return terms


# Transposition


def transpose(
    cotangents: Sequence[Any], x: Operands, spec: GemmSpec, bind: Bind
) -> dict[str, jax.Array]:
    """Returns the cotangents of the operands in which the results are linear, by name.

    Args:
        cotangents: the cotangents of the results; not all are zero.
        x: the operands; each that is to be transposed is an ``UndefinedPrimal``.
        spec: the primitive's parameters.
        bind: applies the primitive.
    """
    linear = [name for name, o in x._asdict().items() if ad.is_undefined_primal(o)]
    remaining = iter(cotangents)
    of_d, *of_pair = (next(remaining) if wanted else None for wanted in spec.epilogue.results)
    of_d, *of_pair = (None if type(g) is ad.Zero else g for g in (of_d, *of_pair))
    if linear == ["a"] and of_d is None:
        return {"a": _transpose_pair(of_pair, x, spec, bind)}
    return _transpose_in_second_weight(of_d, of_pair[1], x, linear, spec, bind)


def _transpose_pair(
    cotangents: Sequence[jax.Array | None], x: Operands, spec: GemmSpec, bind: Bind
) -> jax.Array:
    """Returns the cotangent of ``a`` in ``G = A @ B``, ``U = A @ B2``.

    For two weights, the second product takes the first one as its C. For a packed weight, the sum
    runs over the columns of both at once.

    Args:
        cotangents: the cotangents of ``G`` and ``U``, shape ``(*batch, m, n)``. At most one is
            ``None``, for zero.
        x: the operands; ``a`` is an ``UndefinedPrimal``.
        spec: the primitive's parameters.
        bind: applies the primitive.
    """
    axes = spec.axes

    def product(g: jax.Array, b: Factor, addend: jax.Array | None = None) -> jax.Array:
        full, a = Factor(g, tuple(range(g.ndim))), Factor(x.a, axes.a)
        plain = Operands(x.a, b.array)
        return factor_cotangent(full, a, b, plain, spec.product(), bind, addend)

    if spec.packed:
        some = next(g for g in cotangents if g is not None)
        halves = [jnp.zeros_like(some) if g is None else g for g in cotangents]
        return product(jnp.concatenate(halves, axis=-1), Factor(x.b, axes.b))
    total = None
    weights = (Factor(x.b, axes.b), Factor(x.b2, axes.b2))
    for g, weight in zip(cotangents, weights, strict=True):
        if g is not None:
            total = product(g, weight, total)
    assert total is not None, "both cotangents are zero"
    return total


def _transpose_in_second_weight(
    of_d: jax.Array | None,
    of_u: jax.Array | None,
    x: Operands,
    linear: list[str],
    spec: GemmSpec,
    bind: Bind,
) -> dict[str, jax.Array]:
    """Returns the cotangents of the second weight and its bias, in which ``D`` is linear.

    This is for products that a user transposes. The reverse pass of a derivative goes through the
    pair of products instead.
    """
    check_linear(set(linear) <= {"b2", "bias2"}, "gated_gemm by x or w_gate")
    dtype = accumulator_dtype(x.a.dtype, x.b.dtype, spec.out_dtype)
    axes = spec.axes
    terms = []
    if of_d is not None:
        gate = spec.product(axes=Operands(axes.a, axes.b, bias=axes.bias), out_dtype=dtype)
        (g,) = bind(Operands(x.a, x.b, bias=x.bias), gate)
        terms.append(of_d.astype(dtype) * resolve(spec.activation).reference(g))
    if of_u is not None:
        terms.append(of_u.astype(dtype))

    def second_product(*values: Any) -> jax.Array:
        y = x._replace(**dict(zip(linear, values, strict=True)))
        up = spec.product(axes=Operands(axes.a, axes.b2, bias=axes.bias2))
        return bind(Operands(y.a, y.b2, bias=y.bias2), up)[0]

    transposed = jax.linear_transpose(second_product, *(getattr(x, name).aval for name in linear))
    if not terms:  # only the gate's product has a cotangent, and it does not depend on these
        return {}
    cotangent = reference.convert(sum(terms[1:], terms[0]), spec.out_dtype)
    return dict(zip(linear, transposed(cotangent), strict=True))


# Batching


def with_like_weights(
    x: Operands, dims: Operands, spec: GemmSpec, size: int
) -> tuple[Operands, Operands]:
    """Repeats one weight over the batch if only the other weight is mapped.

    The kernel walks both weights with one set of strides.
    """
    if not spec.is_gated or spec.packed or (dims.b is None) == (dims.b2 is None):
        return x, dims
    lone = "b" if dims.b is None else "b2"
    weight = getattr(x, lone)
    repeated = jnp.broadcast_to(weight, (size, *weight.shape))
    return x._replace(**{lone: repeated}), dims._replace(**{lone: 0})


# Lowering


def products(x: Operands, spec: GemmSpec, bind: Bind) -> list[jax.Array]:
    """Computes ``G``, ``U`` or both, without ``D``, as ordinary products with a bias."""
    axes = spec.axes
    if spec.packed:
        bias, bias_axes = None, None
        if x.bias is not None or x.bias2 is not None:
            bias, bias_axes = _packed_bias(x, spec)
        packed_axes = Operands(axes.a, axes.b, bias=bias_axes)
        plain = spec.product(axes=packed_axes, config=spec.config_of_products)
        (both,) = bind(Operands(x.a, x.b, bias=bias), plain)
        return spec.epilogue.picked((None, *reference.halves(both)))
    results = []
    _, *wanted = spec.epilogue.results
    for is_wanted, b, bias in zip(wanted, ("b", "b2"), ("bias", "bias2"), strict=True):
        if is_wanted:
            own = Operands(axes.a, getattr(axes, b), bias=getattr(axes, bias))
            operands = Operands(x.a, getattr(x, b), bias=getattr(x, bias))
            results += bind(operands, spec.product(axes=own, config=spec.config_of_products))
    return results


def _packed_bias(x: Operands, spec: GemmSpec) -> tuple[jax.Array, Any]:
    """Returns both biases side by side, with zeros for an absent one, and their axes."""
    shapes = Operands(*(None if o is None else o.shape for o in x))
    gemm = spec.strided(shapes)
    present = [axes for axes in (spec.axes.bias, spec.axes.bias2) if axes is not None]
    is_batched = any(axis is not None for axes in present for axis in axes[:-1])
    batch = gemm.batch if is_batched else ()
    halves = []
    for name in ("bias", "bias2"):
        own, own_axes = getattr(x, name), getattr(spec.axes, name)
        if own is None:
            halves.append(jnp.zeros((*batch, gemm.n), spec.out_dtype))
            continue
        own = reference.aligned(own, own_axes)
        halves.append(jnp.broadcast_to(own if batch else own.reshape(-1), (*batch, gemm.n)))
    dtype = common_dtype(*(half.dtype for half in halves))
    bias = jnp.concatenate([half.astype(dtype) for half in halves], axis=-1)
    missing = (None,) * (len(gemm.batch) - len(batch))
    return bias, (*missing, *range(bias.ndim))
