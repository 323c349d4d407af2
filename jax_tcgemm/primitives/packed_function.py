"""``packed_function_p``: a function of the products of an array and one or two packed weights.

One kernel computes the products and the function. The products have the rules of ``packed_p`` under
transformations, and the function those of its operations.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad

from jax_tcgemm import _compat
from jax_tcgemm.epilogue.linear import is_smooth
from jax_tcgemm.epilogue.spec import PackedFunctionSpec
from jax_tcgemm.lowering import packed_function as lowering
from jax_tcgemm.primitives import epilogue_derivative, packed, registration
from jax_tcgemm.primitives.gemm import PREACTIVATION

packed_function_p = Primitive("tcgemm_packed_function")
packed_function_p.multiple_results = True


def bind(operands: Sequence[jax.Array], spec: PackedFunctionSpec) -> list[jax.Array]:
    """Applies the primitive.

    Args:
        operands: ``x`` ``(*batch, m, k)``, packed values and scales of each weight, without a
            batch, and the operands of the function.
        spec: the static parameters.

    Returns:
        The results of the function.
    """
    return registration.apply(packed_function_p, operands, spec)


def composed(*operands: jax.Array, spec: PackedFunctionSpec) -> list[jax.Array]:
    """Computes the products and then the function, in operations of JAX."""
    return _composed(operands, spec, spec.function)


def _computed(*operands: jax.Array, spec: PackedFunctionSpec) -> list[jax.Array]:
    """Does the same when a program is lowered."""
    return _composed(operands, spec, spec.function.computed)


def _composed(
    operands: Sequence[jax.Array], spec: PackedFunctionSpec, function: Callable[..., list[Any]]
) -> list[jax.Array]:
    (x, *weights), others = spec.split(operands)
    pairs = zip(weights[::2], weights[1::2], strict=True)
    return function(*(packed.bind(x, *weight, spec.product) for weight in pairs), *others)


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, spec: PackedFunctionSpec
) -> tuple[list[Any], list[Any]]:
    """Differentiates the function at the products, which the kernel writes as further results."""
    moves = [None if type(t) is ad.Zero else t for t in tangents]
    (_, *weights), others = spec.split(primals)
    (dx, *_), dothers = spec.split(moves)
    wide = spec.product.out_dtype
    kept = spec.function.with_residuals(wide)
    results = bind(primals, dataclasses.replace(spec, function=kept))
    count = len(spec.function.results)
    results, saved = results[:count], [checkpoint_name(y, PREACTIVATION) for y in results[count:]]
    products, masks = saved[: spec.weights], saved[spec.weights :]
    pairs = zip(weights[::2], weights[1::2], strict=True)
    dz = [None if dx is None else packed.bind(dx, *each, spec.product) for each in pairs]
    slopes = [*dz, *dothers, *[None] * len(masks)]
    if all(slope is None for slope in slopes):  # a weight has no derivative
        return results, [_compat.zero_of(y) for y in results]
    values = [*products, *others, *masks]
    made = iter(epilogue_derivative.tangents(spec, wide, values, slopes))
    return results, [next(made) if is_smooth(y.dtype) else _compat.zero_of(y) for y in results]


def _batch(
    axis_data: Any,
    operands: Sequence[Any],
    dims: Sequence[int | None],
    *,
    spec: PackedFunctionSpec,
) -> tuple[list[jax.Array], list[int | None]]:
    """Adds a batch dimension to ``x``; maps the composition if weights or others alone have one."""
    (x_dim, *weight_dims), other_dims = spec.split(dims)
    is_plain = axis_data.explicit_mesh_axis is None and not _compat.is_sharded(*operands)
    if is_plain and x_dim is not None and all(dim is None for dim in weight_dims):
        moved = (*(0,) * spec.weights, *other_dims)
        function = spec.function.mapped(moved, axis_data.size)
        x = jnp.moveaxis(operands[0], x_dim, 0)
        results = bind([x, *operands[1:]], dataclasses.replace(spec, function=function))
        return results, [0] * len(results)
    mapped = functools.partial(composed, spec=spec)
    results = jax.vmap(mapped, tuple(dims), axis_size=axis_data.size)(*operands)
    return results, [0] * len(results)


registration.evaluate_by_jit(packed_function_p, lambda spec: spec.without_rules)
registration.abstract_function(packed_function_p)
registration.drop_unread_results(packed_function_p, lambda *_: None)
ad.primitive_jvps[packed_function_p] = _jvp
registration.transpose_composition(packed_function_p, composed)
registration.batch(packed_function_p, _batch)
# A program that XLA divides has the products, which have rules, and then the function.
registration.lower(
    packed_function_p,
    reference=_computed,
    cuda=functools.partial(lowering.lower_cuda, composed=_computed),
    divided=_computed,
    is_product=False,
)
