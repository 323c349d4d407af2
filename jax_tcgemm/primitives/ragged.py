"""The primitives of products over groups of rows, and their rules.

``ragged_dot_p`` multiplies the rows of each group by the group's matrix; ``ragged_contraction_p``
contracts over the rows of each group. Each of the two is the transpose of the other.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from jax_tcgemm import _compat
from jax_tcgemm.kernels.names import XLA
from jax_tcgemm.lowering import ragged as ragged_lowering
from jax_tcgemm.lowering import ragged_reference, reference
from jax_tcgemm.partitioning import ragged as ragged_division
from jax_tcgemm.partitioning import rules
from jax_tcgemm.primitives import registration
from jax_tcgemm.primitives.activation_gradient import activation_tangent
from jax_tcgemm.primitives.gemm import ACTIVATION, PREACTIVATION
from jax_tcgemm.problem.arithmetic import accumulator_dtype, resolve_algorithm
from jax_tcgemm.problem.epilogue import PLAIN
from jax_tcgemm.problem.ragged import RaggedSpec

ragged_dot_p = Primitive("tcgemm_ragged_dot")
ragged_contraction_p = Primitive("tcgemm_ragged_contraction")


def dot(spec: RaggedSpec, *operands: jax.Array, out_sharding: Any = None) -> list[jax.Array]:
    """Applies ``ragged_dot_p`` to ``lhs``, ``rhs``, ``group_sizes`` and possibly a bias.

    Returns:
        ``[d]``, or ``d`` and the pre-activation; see ``ragged_reference.reference_dot``. On a mesh
        with explicit axes, their rows are sharded like those of ``lhs``, and their columns like
        those of ``rhs``.
    """
    columns = 1 if spec.transpose_rhs else 2
    sources = ((0, 0), (1, columns))
    return _bind(ragged_dot_p, operands, spec, spec.result_count, sources, out_sharding)


def contraction(spec: RaggedSpec, *operands: jax.Array) -> list[jax.Array]:
    """Applies ``ragged_contraction_p`` to ``lhs``, ``rhs`` and ``group_sizes``."""
    return _bind(ragged_contraction_p, operands, spec, 1, (None, (0, 1), (1, 1)), None)


def _bind(
    primitive: Primitive,
    operands: Sequence[jax.Array],
    spec: RaggedSpec,
    count: int,
    sources: Sequence[tuple[int, int] | None],
    out_sharding: Any,
) -> list[jax.Array]:
    """Applies a primitive.

    Args:
        primitive: the primitive.
        operands: its operands.
        spec: its static parameters.
        count: number of results.
        sources: for each dimension of a result, the operand whose type says how it is sharded, and
            the dimension of that operand; ``None`` for none.
        out_sharding: sharding of the results' types, in place of ``sources``.
    """
    if _compat.is_unreduced(*operands):
        types = ", ".join(str(jax.typeof(x)) for x in operands)
        raise NotImplementedError(
            f"products over groups of operands whose types are sums over mesh axes ({types}), "
            "which jax.lax.ragged_dot does not have either; use jax.reshard"
        )

    if out_sharding is None and _compat.is_sharded(*operands):
        out_sharding = _compat.sharding_from(operands, sources)
    shardings = None if out_sharding is None else [out_sharding] * count
    return registration.apply(primitive, operands, spec, shardings)


# Abstract evaluation


def _dot_abstract_eval(lhs: Any, rhs: Any, group_sizes: Any, *bias: Any, spec: RaggedSpec):
    n = rhs.shape[1 if spec.transpose_rhs else 2]
    operands = (lhs, rhs, group_sizes, *bias)
    result = _compat.result_aval(operands, (lhs.shape[0], n), spec.out_dtype)
    return [result] * spec.result_count


def _contraction_abstract_eval(lhs: Any, rhs: Any, group_sizes: Any, *, spec: RaggedSpec):
    shape = (group_sizes.shape[0], lhs.shape[1], rhs.shape[1])
    return [_compat.result_aval((lhs, rhs, group_sizes), shape, spec.out_dtype)]


# Forward derivative


def _tangents(tangents: Sequence[Any]) -> list[Any]:
    return [None if type(tangent) is ad.Zero else tangent for tangent in tangents]


def _dot_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, spec: RaggedSpec
) -> tuple[list[Any], list[Any]]:
    """Derives ``d = f(z)`` by ``d' = f'(z) z'``.

    Rows of no group stay zero, because their ``z'`` is zero.
    """
    dlhs, drhs, _, *dbias = _tangents(tangents)
    dz = linear_tangent(primals, (dlhs, drhs, *dbias), spec)
    if spec.activation is None:
        return dot(spec, *primals), [dz] * spec.result_count
    d, z = dot(spec.only((True, True)), *primals)
    d, z = checkpoint_name(d, ACTIVATION), checkpoint_name(z, PREACTIVATION)
    dd = activation_tangent(spec.activation, z, dz)
    return spec.epilogue.picked((d, z)), spec.epilogue.picked((dd, dz))


def linear_tangent(primals: Sequence[Any], tangents: Sequence[Any], spec: RaggedSpec) -> Any:
    """Returns the tangent of the pre-activation: one linear product per operand's tangent."""
    lhs, rhs, group_sizes, *_ = primals
    dlhs, drhs, *dbias = tangents
    plain = dataclasses.replace(spec, epilogue=PLAIN, config=None)
    terms: list[jax.Array] = []
    if dlhs is not None:
        terms += dot(plain, dlhs, rhs, group_sizes)
    if drhs is not None:
        terms += dot(plain, lhs, drhs, group_sizes)
    if dbias and dbias[0] is not None:
        terms.append(_rows_of(dbias[0], lhs.shape[0], group_sizes, spec))
    if len(terms) < 2:
        return terms[0]
    wide = accumulator_dtype(spec.out_dtype, spec.out_dtype, spec.out_dtype)
    total = sum((term.astype(wide) for term in terms[1:]), terms[0].astype(wide))
    return reference.convert(total, spec.out_dtype)


def _exact(dtype: Any, out_dtype: Any) -> RaggedSpec:
    """Returns a product with ones, which XLA computes if no kernel has the types."""
    precision = (lax.Precision.HIGHEST,) * 2
    algorithm = resolve_algorithm(dtype, dtype, out_dtype, precision)
    return RaggedSpec(out_dtype, precision, config=XLA if algorithm is None else None)


def _rows_of(vectors: jax.Array, rows: int, group_sizes: jax.Array, spec: RaggedSpec) -> jax.Array:
    """Repeats each group's vector for its rows, as a product whose transpose sums rows."""
    ones = jnp.ones((rows, 1), vectors.dtype)
    exact = _exact(vectors.dtype, spec.out_dtype)
    return dot(exact, ones, lax.expand_dims(vectors, (1,)), group_sizes)[0]


def _contraction_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, spec: RaggedSpec
) -> tuple[list[Any], list[Any]]:
    lhs, rhs, group_sizes = primals
    dlhs, drhs, _ = _tangents(tangents)
    terms: list[jax.Array] = []
    if dlhs is not None:
        terms += contraction(spec, dlhs, rhs, group_sizes)
    if drhs is not None:
        terms += contraction(spec, lhs, drhs, group_sizes)
    return contraction(spec, *primals), [sum(terms[1:], terms[0])]


# Transposition


def _dot_transpose(cotangents: Sequence[Any], *operands: Any, spec: RaggedSpec) -> list[Any]:
    lhs, rhs, group_sizes, *bias = operands
    assert spec.activation is None, spec
    (ct,) = cotangents
    results: list[Any] = [None] * len(operands)
    if type(ct) is ad.Zero:
        return results
    if ad.is_undefined_primal(lhs):
        of_lhs = _of_aval(spec, lhs.aval, transpose_rhs=not spec.transpose_rhs)
        (results[0],) = dot(of_lhs, ct, rhs, group_sizes)
    if ad.is_undefined_primal(rhs):
        factors = (ct, lhs) if spec.transpose_rhs else (lhs, ct)
        of_rhs = _of_aval(spec, rhs.aval, transpose_rhs=False)
        (results[1],) = contraction(of_rhs, *factors, group_sizes)
    if bias and ad.is_undefined_primal(bias[0]):
        results[3] = _row_sums(ct, group_sizes, bias[0].aval.dtype)
    return results


def _row_sums(x: jax.Array, group_sizes: jax.Array, dtype: Any) -> jax.Array:
    """Sums the rows of each group and rounds only once; the transpose of ``_rows_of``."""
    ones = jnp.ones((x.shape[0], 1), x.dtype)
    exact = _exact(x.dtype, dtype)
    return contraction(exact, ones, x, group_sizes)[0][:, 0]


def _contraction_transpose(
    cotangents: Sequence[Any], lhs: Any, rhs: Any, group_sizes: Any, *, spec: RaggedSpec
) -> list[Any]:
    (ct,) = cotangents
    if type(ct) is ad.Zero:
        return [None] * 3
    if ad.is_undefined_primal(lhs):
        spec = _of_aval(spec, lhs.aval, transpose_rhs=True)
        return [dot(spec, rhs, ct, group_sizes)[0], None, None]
    spec = _of_aval(spec, rhs.aval, transpose_rhs=False)
    return [None, dot(spec, lhs, ct, group_sizes)[0], None]


def _of_aval(spec: RaggedSpec, aval: Any, **changes: Any) -> RaggedSpec:
    config = spec.config if spec.config == XLA else None
    return dataclasses.replace(spec, out_dtype=aval.dtype, config=config, **changes)


# Batching


def batch_one_by_one(
    apply: Callable[..., list[jax.Array]],
    axis_data: Any,
    operands: Sequence[Any],
    dims: Sequence[int | None],
    *,
    spec: RaggedSpec,
) -> tuple[list[jax.Array], list[int | None]]:
    """Computes one product after the other, because each has its own groups."""
    if all(dim is None for dim in dims):
        results = apply(spec, *operands)
        return results, [None] * len(results)
    mapped = [
        jnp.moveaxis(operand, dim, 0)
        for operand, dim in zip(operands, dims, strict=True)
        if dim is not None
    ]

    def one(own: Sequence[jax.Array]) -> list[jax.Array]:
        remaining = iter(own)
        return apply(
            spec,
            *(
                operand if dim is None else next(remaining)
                for operand, dim in zip(operands, dims, strict=True)
            ),
        )

    results = lax.map(one, mapped)
    return results, [0] * len(results)


# Registration

for _primitive, _apply, _abstract_eval, _jvp, _transpose, _reference, _cuda in (
    (
        ragged_dot_p,
        dot,
        _dot_abstract_eval,
        _dot_jvp,
        _dot_transpose,
        ragged_reference.reference_dot,
        ragged_lowering.cuda_dot,
    ),
    (
        ragged_contraction_p,
        contraction,
        _contraction_abstract_eval,
        _contraction_jvp,
        _contraction_transpose,
        ragged_reference.reference_contraction,
        ragged_lowering.cuda_contraction,
    ),
):
    _primitive.multiple_results = True
    registration.evaluate_by_jit(_primitive)
    _primitive.def_abstract_eval(_abstract_eval)
    registration.drop_unread_results(_primitive)
    ad.primitive_jvps[_primitive] = _jvp
    ad.primitive_transposes[_primitive] = _transpose
    batching.fancy_primitive_batchers[_primitive] = functools.partial(batch_one_by_one, _apply)
    registration.lower(_primitive, reference=_reference, cuda=_cuda)

rules.register(ragged_dot_p, ragged_division.dot_rule(dot))
rules.register(ragged_contraction_p, ragged_division.contraction_rule(contraction))
