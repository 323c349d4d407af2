"""The primitives of products with a user's epilogue.

``compiled_p`` is for gemms and gated products, ``compiled_ragged_p`` for products over groups of
rows. Their rules are those of the epilogue function, which JAX differentiates and batches. The
product is linear, so its rules are those of the primitive without an epilogue.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad

from jax_tcgemm import _compat
from jax_tcgemm.epilogue.linear import is_smooth
from jax_tcgemm.epilogue.spec import CompiledSpec
from jax_tcgemm.kernels.names import NO_ROWS, XLA
from jax_tcgemm.lowering import jit_epilogue as compiled_lowering
from jax_tcgemm.lowering import reference
from jax_tcgemm.partitioning import functions as division
from jax_tcgemm.partitioning import rules
from jax_tcgemm.primitives import epilogue_derivative, gated, ragged, registration
from jax_tcgemm.primitives import gemm as gemm_primitive
from jax_tcgemm.primitives.gemm import PREACTIVATION
from jax_tcgemm.primitives.tangents import linear_tangents
from jax_tcgemm.problem.arithmetic import accumulator_dtype, is_quantized
from jax_tcgemm.problem.spec import flatten
from jax_tcgemm.problem.strides import Operands, insert_batches

compiled_p = Primitive("tcgemm_compiled")
compiled_ragged_p = Primitive("tcgemm_compiled_ragged")


def bind(operands: Sequence[jax.Array], spec: CompiledSpec) -> list[jax.Array]:
    """Applies the primitive of a product.

    Args:
        operands: operands of the product, then those of the function.
        spec: the static parameters.

    Returns:
        The results of the function.
    """
    primitive = compiled_ragged_p if spec.is_grouped else compiled_p
    return registration.bind(primitive, operands, spec, composed, typed=_typed)


def composed(*operands: jax.Array, spec: CompiledSpec) -> list[jax.Array]:
    """Computes the product and then the function, in operations of JAX."""
    own, others = spec.split(operands)
    return spec.function(*_accumulators(own, spec), *others)


def _apart(*operands: jax.Array, spec: CompiledSpec) -> list[jax.Array]:
    """Computes the same from separate products, of which a single one may be transposed."""
    own, others = spec.split(operands)
    return spec.function(*_accumulators(own, spec, apart=True), *others)


def _typed(*operands: jax.Array, spec: CompiledSpec) -> list[jax.Array]:
    """Computes results for the sake of their types, on a mesh with explicit axes."""
    own, others = spec.split(operands)
    products = _accumulators(own, spec)
    return spec.function.of_shardings(*products, *others, beside=products[0])


def _computed(*operands: jax.Array, spec: CompiledSpec) -> list[jax.Array]:
    """Does the same when a program is lowered."""
    own, others = spec.split(operands)
    product = spec.product
    if spec.unfused is not None and product.config_of_products == XLA:
        stored = reference.accumulators(product.unflatten(own), product, rounds=True)
        return spec.unfused.computed(*(x.astype(product.out_dtype) for x in stored), *others)
    return spec.function.computed(*_accumulators(own, spec), *others)


def accumulators_dtype(operands: Sequence[Any], spec: CompiledSpec) -> Any:
    """Returns the type of the accumulators."""
    a, b = operands[:2]
    return accumulator_dtype(a.dtype, b.dtype, spec.product.out_dtype)


def _accumulators(
    own: Sequence[jax.Array], spec: CompiledSpec, *, apart: bool = False
) -> list[jax.Array]:
    """Returns the products as the function takes them; with ``apart``, two are two operations."""
    product, dtype = spec.product, accumulators_dtype(own, spec)
    if spec.scaled:
        a, b, *scales = own
        own = [_scaled(x, scale) for x, scale in zip((a, b), scales, strict=True)]
        product = product.replace(precision=_compat.canonicalize_precision("highest"))
    config = product.config_of_products
    if is_quantized(own[0].dtype, own[1].dtype) or spec.scaled:  # only this primitive has rows
        config = config if config in NO_ROWS else None
    x, product = product.unflatten(own), product.replace(out_dtype=dtype, config=config)
    if apart and product.is_gated:
        return gated.products(x, product, gemm_primitive.bind)
    return gemm_primitive.bind(x, product)


def _scaled(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns a factor times its block scales, in float32."""
    for axis, (extent, blocks) in enumerate(zip(x.shape, scale.shape, strict=True)):
        scale = jnp.repeat(scale, extent // blocks, axis)
    return x.astype(jnp.float32) * scale


# Dead code elimination


def _read(spec: CompiledSpec, used: Sequence[bool], count: int) -> tuple[CompiledSpec, list[bool]]:
    """Returns the spec of the results that are read; it keeps all operands."""
    if not all(used):
        spec = spec.changed(lambda function: function.only(used))
    return spec, [True] * count


# Forward derivative


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, spec: CompiledSpec
) -> tuple[list[Any], list[Any]]:
    moves = [None if type(t) is ad.Zero else t for t in tangents]
    results, values, slopes = with_slopes(primals, moves, spec)
    wide = accumulators_dtype(primals, spec)
    made = iter(epilogue_derivative.tangents(spec, wide, values, slopes))
    return results, [next(made) if is_smooth(x.dtype) else _compat.zero_of(x) for x in results]


def with_slopes(
    primals: Sequence[Any], tangents: Sequence[Any], spec: CompiledSpec
) -> tuple[list[Any], list[Any], list[Any]]:
    """Computes the results, the values at which to differentiate, and their tangents.

    Args:
        primals: the operands.
        tangents: the tangents of the operands, ``None`` for zero.
        spec: the static parameters.

    Returns:
        The results. Then the values: the accumulators, which are requested too and rounded like a
        product, the operands of the function, and the masks. Then the tangents of the values.
    """
    own, others = spec.split(primals)
    down, dothers = spec.split(tangents)
    count = spec.function.accumulators
    kept = spec.changed(lambda function: function.with_residuals(spec.product.out_dtype))
    results = bind(primals, kept)
    own_count = len(spec.function.results)
    results, saved = results[:own_count], results[own_count:]
    saved = [checkpoint_name(x, PREACTIVATION) for x in saved]
    saved, masks = saved[:count], saved[count:]
    moves = any(t is not None for t in down)
    if moves and spec.scaled:
        raise TypeError(
            "a product of operands with scales by blocks has no derivative by these operands; "
            "accepted: fp8_dot, which quantizes the operands of each product of the derivative"
        )
    dz = _product_tangents(own, down, spec) if moves else [None] * count
    return results, [*saved, *others, *masks], [*dz, *dothers, *[None] * len(masks)]


def _product_tangents(own: Sequence[Any], down: Sequence[Any], spec: CompiledSpec) -> list[Any]:
    product = spec.product
    x, dx = product.unflatten(own), product.unflatten(down)
    return linear_tangents(x, dx, product.replace(config=None), gemm_primitive.bind)


# Batching


def _batch(
    axis_data: Any, operands: Sequence[Any], dims: Sequence[int | None], *, spec: CompiledSpec
) -> tuple[list[jax.Array], Sequence[int | None]]:
    """Adds an outermost batch dimension."""
    own, others = spec.split(operands)
    own_dims, other_dims = spec.split(dims)
    size, count = axis_data.size, spec.function.accumulators
    if all(dim is None for dim in own_dims):  # the products are computed once
        products = _accumulators(own, spec)
        in_axes = (*(None,) * count, *other_dims)
        results = jax.vmap(spec.function, in_axes=in_axes, axis_size=size)(*products, *others)
        return results, [0] * len(results)
    product = spec.product
    scales: list[jax.Array] = []
    if spec.scaled:
        own, own_dims, scales = _with_like_scales(own, own_dims, size)
    x, dim = product.unflatten(own), product.unflatten(own_dims)
    x, dim = gated.with_like_weights(x, dim, product, size)
    dim = Operands(*dim)
    function_dims = (*(0,) * count, *other_dims)
    batched = spec.changed(lambda function: function.mapped(function_dims, size))
    batched = batched.replace(product=product.replace(axes=insert_batches(product.axes, dim)))
    results = bind([*flatten(x), *scales, *others], batched)
    return results, [0] * len(results)


def _with_like_scales(
    own: Sequence[jax.Array], dims: Sequence[int | None], size: int
) -> tuple[list[jax.Array], list[int | None], list[jax.Array]]:
    """Returns factors, their mapped dimensions, and block scales that are mapped likewise."""
    factors, scales = list(own[:2]), list(own[2:])
    where: list[int | None] = list(dims[:2])
    for i, (scale, dim) in enumerate(zip(scales, dims[2:], strict=True)):
        at = where[i]
        if at is None and dim is not None:
            factors[i] = jnp.broadcast_to(factors[i], (size, *factors[i].shape))
            at = where[i] = 0
        if at is not None:
            scale = jnp.broadcast_to(scale, (size, *scale.shape)) if dim is None else scale
            scales[i] = jnp.moveaxis(scale, dim or 0, at)
    return factors, where, scales


# Registration

for _primitive in (compiled_p, compiled_ragged_p):
    _primitive.multiple_results = True
    registration.evaluate_by_jit(_primitive, lambda spec: spec.without_rules)
    registration.abstract_function(_primitive)
    registration.drop_unread_results(_primitive, _read)
    ad.primitive_jvps[_primitive] = _jvp
    registration.transpose_composition(_primitive, _apart)
    registration.lower(
        _primitive,
        reference=_computed,
        cuda=functools.partial(compiled_lowering.cuda_compiled, composed=_computed),
    )
registration.batch(compiled_p, _batch)
ragged.batch_one_by_one(compiled_ragged_p)
rules.register(compiled_p, division.rule(bind, gemm_primitive.bind))
