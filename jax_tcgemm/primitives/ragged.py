"""Rules specific to products over groups of rows.

The product of each group's rows and the group's matrix, and the contraction over the rows of each
group, are each the transpose of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad

from jax_tcgemm import _compat
from jax_tcgemm.kernels.names import XLA
from jax_tcgemm.primitives import registration
from jax_tcgemm.primitives.factor_cotangent import Bind, check_linear
from jax_tcgemm.problem import ragged
from jax_tcgemm.problem.arithmetic import resolve_algorithm
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Operands


def result_sharding(operands: Sequence[jax.Array], spec: GemmSpec, requested: Any) -> Any:
    """Returns the sharding of the results' types on a mesh with explicit axes, else ``None``.

    Args:
        operands: the primitive's operands.
        spec: the primitive's parameters.
        requested: the requested sharding, or ``None``.

    Raises:
        NotImplementedError: the types of operands are sums over mesh axes.
    """
    note = ", which jax.lax.ragged_dot does not have either"
    registration.check_reduced("products over groups of", operands, note)
    if requested is not None or not _compat.is_sharded(*operands):
        return requested
    groups: list[tuple[int, int] | None] = [None] if spec.grouped == "k" else []
    rows, columns = (0, spec.axes.a[-2]), (1, spec.axes.b[-1])
    return _compat.sharding_from(operands, [*groups, rows, columns])


# Forward derivative


def tangent_terms(x: Operands, dx: Operands, spec: GemmSpec, bind: Bind) -> list[list[jax.Array]]:
    """Returns the terms of the pre-activation's tangent; arguments as in ``linear_tangents``."""
    factors = Operands(x.a, x.b, x.group_sizes)
    terms: list[jax.Array] = []
    for name in ("a", "b"):
        tangent = getattr(dx, name)
        if tangent is not None:
            terms += bind(factors._replace(**{name: tangent}), spec.product())
    if dx.bias is not None:
        terms.append(_rows_of(dx.bias, x, spec, bind))
    return [terms]


def _exact(dtype: Any, out_dtype: Any) -> tuple[Any, Any, str | None]:
    """Returns parameters of a product with ones; XLA computes it if no kernel has the types."""
    precision = (lax.Precision.HIGHEST,) * 2
    algorithm = resolve_algorithm(dtype, dtype, out_dtype, precision)
    return out_dtype, precision, XLA if algorithm is None else None


def _rows_of(vectors: jax.Array, x: Operands, spec: GemmSpec, bind: Bind) -> jax.Array:
    """Repeats each group's vector for its rows, as a product whose transpose sums rows."""
    ones = jnp.ones((x.a.shape[0], 1), vectors.dtype)
    exact = ragged.dot(*_exact(vectors.dtype, spec.out_dtype))
    return bind(Operands(ones, lax.expand_dims(vectors, (1,)), x.group_sizes), exact)[0]


# Transposition


def transpose(
    cotangents: Sequence[Any], x: Operands, spec: GemmSpec, bind: Bind
) -> dict[str, jax.Array]:
    """Returns the cotangents of the operands in which the results are linear, by name.

    Args:
        cotangents: the cotangent of the result, not zero.
        x: the operands; each that is to be transposed is an ``UndefinedPrimal``.
        spec: the primitive's parameters.
        bind: applies the primitive.
    """
    check_linear(spec.activation is None, f"activation={spec.activation!r}")
    (ct,) = cotangents
    results = {}
    for name in (name for name, o in x._asdict().items() if ad.is_undefined_primal(o)):
        dtype = getattr(x, name).aval.dtype
        if name == "bias":
            results[name] = _row_sums(ct, x.group_sizes, dtype, bind)
            continue
        like = dtype, spec.precision, XLA if spec.config == XLA else None
        if spec.grouped == "k":
            factors = (x.b if name == "a" else x.a, ct)
            product = ragged.dot(*like, transpose_b=name == "a")
        elif name == "a":
            factors, product = (ct, x.b), ragged.dot(*like, transpose_b=not spec.transposes_b)
        else:
            factors = (ct, x.a) if spec.transposes_b else (x.a, ct)
            product = ragged.contraction(*like)
        (results[name],) = bind(Operands(*factors, x.group_sizes), product)
    return results


def _row_sums(x: jax.Array, group_sizes: jax.Array, dtype: Any, bind: Bind) -> jax.Array:
    """Sums the rows of each group and rounds only once; the transpose of ``_rows_of``."""
    ones = jnp.ones((x.shape[0], 1), x.dtype)
    exact = ragged.contraction(*_exact(x.dtype, dtype))
    return bind(Operands(ones, x, group_sizes), exact)[0][:, 0]


# Batching


def batch_one_by_one(primitive: Primitive) -> None:
    """Makes ``vmap`` compute one product after the other, because each has its own groups."""

    def batch(
        axis_data: Any, operands: Sequence[Any], dims: Sequence[int | None], *, spec: Any
    ) -> tuple[list[jax.Array], list[int | None]]:
        del axis_data
        pairs = [*zip(operands, dims, strict=True)]

        def one(own: Sequence[jax.Array]) -> list[jax.Array]:
            remaining = iter(own)
            values = [x if dim is None else next(remaining) for x, dim in pairs]
            return registration.apply(primitive, values, spec)

        results = lax.map(one, [jnp.moveaxis(x, dim, 0) for x, dim in pairs if dim is not None])
        return results, [0] * len(results)

    registration.batch(primitive, batch)
