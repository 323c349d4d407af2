"""The gemm in ``jax.numpy``: lowering without a kernel, and reference of the tests."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm.lowering import dots
from jax_tcgemm.problem.activations import resolve
from jax_tcgemm.problem.arithmetic import (
    INPUT_DTYPES,
    accumulator_dtype,
    resolve_algorithm,
    sum_dtype,
)
from jax_tcgemm.problem.epilogue import Use
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Axes, Operands, matrix_last, result_axes


def reference_gemm(*operands: jax.Array, spec: GemmSpec, as_jnp: bool = False) -> list[jax.Array]:
    """Computes the primitive in ``jax.numpy``.

    Args:
        *operands: the primitive's operands, those present of ``Operands``.
        spec: the primitive's parameters.
        as_jnp: whether a product may be rounded to the result's type before the epilogue, as in
            ``jnp``. This is for programs that XLA divides among devices: if k is divided, partial
            products are added up across devices, and float32 would double the traffic. Exception:
            float16 products are rounded only if there is no epilogue.

    Returns:
        The results that ``spec`` requests, of shape ``(*batch, m, n)`` and dtype
        ``spec.out_dtype``. For 16-bit results, the accumulators and the epilogue are float32,
        rounded once.
    """
    x = spec.unflatten(operands)
    # A float16 product may overflow before an epilogue scales it down. Without an epilogue the
    # product is rounded once in any case.
    rounds = spec.work == "none" or (as_jnp and spec.out_dtype == jnp.bfloat16)
    return epilogue(accumulators(x, spec, rounds), x, spec)


def natural_gemm(*operands: jax.Array, spec: GemmSpec) -> list[jax.Array]:
    """Computes the gemm as a user of ``jnp`` would write it, for calls that request XLA.

    The product and its addends are summed in the operands' own type, in which XLA's fast products
    write and add. An activation of the sum is computed in float32. ``reference_gemm`` computes
    these cases instead:

    - ``jnp`` has no such sum;
    - anything is scaled;
    - an activation follows a float16 product, which may overflow.

    Args:
        *operands: the primitive's operands.
        spec: the primitive's parameters.
    """
    x = spec.unflatten(operands)
    own = {each.dtype for each in operands} == {spec.out_dtype} and spec.out_dtype.itemsize == 2
    is_safe = spec.activation is None or spec.out_dtype == jnp.bfloat16
    is_sum = spec.epilogue.form == "add" and spec.alpha == spec.beta == 1
    others = (x.alpha, x.beta, x.row_scale, x.column_scale)
    if not (own and is_safe and is_sum) or any(each is not None for each in others):
        return reference_gemm(*operands, spec=spec)
    (z,) = accumulators(x, spec, rounds=True)
    for term in addends(x, spec, spec.out_dtype):
        z = z + term
    return finished([z if spec.activation is None else z.astype(jnp.float32)], x, spec)


def accumulators(x: Operands, spec: GemmSpec, rounds: bool = False) -> list[jax.Array]:
    """Returns the product, or both of a gated product; ``rounds`` is as in ``product``."""
    first = product(x.a, x.b, spec, rounds)
    if spec.packed:
        return halves(first)
    if not spec.is_gated:
        return [first]
    second = spec.replace(axes=spec.axes._replace(b=spec.axes.b2))
    return [first, product(x.a, x.b2, second, rounds)]


def halves(both: jax.Array) -> list[jax.Array]:
    """Splits the columns of a packed weight, or of a product with it, into gate and up."""
    n = both.shape[-1] // 2
    return [*lax.split(both, (n, n), axis=both.ndim - 1)]


def product(a: jax.Array, b: jax.Array, spec: GemmSpec, rounds: bool = False) -> jax.Array:
    """Returns the accumulator ``A @ B``, of shape ``(*batch, m, n)``.

    Args:
        a: the first factor.
        b: the second factor.
        spec: the primitive's parameters.
        rounds: whether the accumulator has the result's type if that is the operands' own.
    """
    algorithm = resolve_algorithm(a.dtype, b.dtype, spec.out_dtype, spec.precision)
    precision, dtype = spec.precision, accumulator_dtype(a.dtype, b.dtype, spec.out_dtype)
    if algorithm is not None:
        # The algorithm is spelled out in dtypes: XLA's compilers know few of the presets. If sums
        # may be float16, XLA adds in float32 and rounds once.
        a, b = (x.astype(INPUT_DTYPES[algorithm]) for x in (a, b))
        dtype = sum_dtype(algorithm)
        if rounds and spec.out_dtype == INPUT_DTYPES[algorithm]:
            dtype = spec.out_dtype
        precision = lax.Precision.DEFAULT
    else:
        a, b = dots.alike(a, b, dtype)
    return _dot(a, b, spec, precision, dtype)


def _dot(a: jax.Array, b: jax.Array, spec: GemmSpec, precision, dtype: np.dtype) -> jax.Array:
    batch = range(spec.batch_ndim)
    a_axes, b_axes = spec.axes.a, spec.axes.b
    both = [i for i in batch if a_axes[i] is not None and b_axes[i] is not None]
    dimension_numbers = (
        ([a_axes[-1]], [b_axes[-2]]),
        ([a_axes[i] for i in both], [b_axes[i] for i in both]),
    )
    out = dots.dot(a, b, dimension_numbers, precision, dtype)
    # dot_general's result has the shared batch, then what is left of a, then what is left of b.
    m, n = spec.batch_ndim, spec.batch_ndim + 1
    rest_a = {*batch, m}.difference(both)
    rest_b = {*batch, n}.difference(both)
    order = [*both, *_by_position(a_axes, rest_a), *_by_position(b_axes, rest_b)]
    return lax.transpose(out, [order.index(i) for i in range(n + 1)])


def _by_position(axes: Axes, roles: set[int]) -> list[int]:
    """Returns those of ``roles`` that an operand has, in the order of its shape."""
    located = sorted((axis, i) for i in roles if (axis := axes[i]) is not None)
    return [i for _, i in located]


def _absent(axes: Axes) -> list[int]:
    return [i for i, axis in enumerate(axes) if axis is None]


def epilogue(products: Sequence[jax.Array], x: Operands, spec: GemmSpec) -> list[jax.Array]:
    """Returns the results of the epilogue of given accumulators; see ``problem/epilogue.py``.

    Args:
        products: the accumulators, as many as the form has; each broadcasts to ``(*batch, m, n)``.
        x: the operands; the factors of the products are ignored.
        spec: the primitive's parameters.
    """
    dtype = products[0].dtype
    dtype = accumulator_dtype(dtype, dtype, spec.out_dtype)
    z, *second = (accumulator.astype(dtype) for accumulator in products)
    for factor in factors(x, spec, dtype):
        z = factor * z
    for term in addends(_for_use(x, spec, Use.ADDEND), spec, dtype):
        z = z + term
    for name in spec.epilogue.names(Use.SECOND_ADDEND):
        if getattr(x, name) is not None:
            second = [u + over_result(name, x, spec, dtype) for u in second]
    return finished([z, *second], x, spec)


def finished(preactivations: Sequence[jax.Array], x: Operands, spec: GemmSpec) -> list[jax.Array]:
    """Returns the results for given pre-activations, computed in their type.

    Args:
        preactivations: one for each accumulator.
        x: the operands; only those that come after the activation are used.
        spec: the primitive's parameters.
    """
    if spec.epilogue.is_derivative:
        return cotangents(preactivations[0], x, spec)
    z, *second = preactivations
    d = resolve(spec.activation).reference(z)
    for u in second:
        d = d * u
    for term in addends(_for_use(x, spec, Use.RESIDUAL), spec, z.dtype):
        d = d + term
    for name in spec.epilogue.names(Use.FACTOR):
        d = d * over_result(name, x, spec, z.dtype)
    results = spec.epilogue.picked((d, z, *second))
    return [convert(result, spec.out_dtype) for result in results]


def _for_use(x: Operands, spec: GemmSpec, use: Use) -> Operands:
    """Returns the operands of one use and their coefficient."""
    names = {*spec.epilogue.names(use), *spec.epilogue.names(Use.COEFFICIENT)}
    return x._replace(**{name: None for name in x._fields if name not in names})


def cotangents(z: jax.Array, x: Operands, spec: GemmSpec) -> list[jax.Array]:
    """Takes a cotangent ``z`` back through ``activation(C)``, or ``activation(C) * C2``."""
    activation = resolve(spec.activation)
    c = over_result("c", x, spec, z.dtype)
    results = [z * activation.derivative(c)]
    for name in spec.epilogue.names(Use.SECOND_PRIMAL):
        c2 = over_result(name, x, spec, z.dtype)
        results = [results[0] * c2, z * activation.reference(c)]
    return [convert(result, spec.out_dtype) for result in spec.epilogue.picked(results)]


def convert(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns ``x`` in another dtype; a real dtype takes the real part of a complex ``x``."""
    if jnp.iscomplexobj(x) and not jnp.issubdtype(dtype, jnp.complexfloating):
        x = lax.real(x)
    return x.astype(dtype)


def batch_dims(results: list[jax.Array], size: int) -> tuple[list[jax.Array], list[int | None]]:
    """Returns the results of a batched epilogue, and the mapped dimension of each.

    A result whose outermost extent is not ``size`` is not mapped; that extent is 1.
    """
    mapped = [result.shape[0] == size for result in results]
    pairs = list(zip(results, mapped, strict=True))
    return (
        [result if is_mapped else result[0] for result, is_mapped in pairs],
        [0 if is_mapped else None for is_mapped in mapped],
    )


def factors(x: Operands, spec: GemmSpec, dtype: np.dtype) -> list[jax.Array]:
    """Returns ``alpha`` and the scales that are present, broadcastable to ``(*batch, m, n)``."""
    scales = [
        over_result(name, x, spec, dtype)
        for name in spec.epilogue.names(Use.SCALE)
        if getattr(x, name) is not None
    ]
    return scales if spec.alpha == 1 else [jnp.asarray(spec.alpha, dtype), *scales]


def addends(x: Operands, spec: GemmSpec, dtype: np.dtype) -> list[jax.Array]:
    """Returns ``beta * c`` and ``bias`` if present, broadcastable to ``(*batch, m, n)``."""
    terms = []
    if x.c is not None:
        beta = beta_factor(x, spec, dtype)
        c = over_result("c", x, spec, dtype)
        terms.append(c if beta is None else beta * c)
    if x.bias is not None:
        terms.append(over_result("bias", x, spec, dtype))
    return terms


def beta_factor(x: Operands, spec: GemmSpec, dtype: np.dtype) -> jax.Array | None:
    """Returns ``beta``, broadcastable to ``(*batch, m, n)``; ``None`` for 1."""
    if x.beta is not None:
        return over_result("beta", x, spec, dtype)
    return None if spec.beta == 1 else jnp.asarray(spec.beta, dtype)


def over_result(name: str, x: Operands, spec: GemmSpec, dtype: np.dtype) -> jax.Array:
    """Returns an operand of the epilogue, broadcastable to ``(*batch, m, n)``."""
    return aligned(getattr(x, name), result_axes(name, getattr(spec.axes, name))).astype(dtype)


def aligned(x: jax.Array, axes: Axes) -> jax.Array:
    """Returns ``x`` in the order of ``axes``, with extent 1 where it has no such axis."""
    return lax.expand_dims(lax.transpose(x, matrix_last(axes)), _absent(axes))
