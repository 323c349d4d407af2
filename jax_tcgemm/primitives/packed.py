"""``packed_p``, the product with a packed weight, and its rule under each JAX transformation.

The primitive is linear in the left operand. The weight has no derivative.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from jax_tcgemm import _compat
from jax_tcgemm.lowering import packed as packed_lowering
from jax_tcgemm.lowering import packed_layout
from jax_tcgemm.partitioning import packed as division
from jax_tcgemm.partitioning import rules
from jax_tcgemm.primitives import gemm, registration
from jax_tcgemm.problem.packed import TILE, PackedSpec, tiles
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Operands

packed_p = Primitive("tcgemm_packed")
packed_p.multiple_results = True


def bind(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    spec: PackedSpec,
    out_sharding: Any = None,
) -> jax.Array:
    """Applies the primitive.

    Args:
        x: ``(*batch, m, k)``, floating-point numbers.
        values: packed values, with the same batch or without one.
        scales: packed scales, with the batch of ``values``.
        spec: the static parameters.
        out_sharding: sharding of the result's type on a mesh with explicit axes. By default rows
            are sharded like those of ``x``, and columns like those of the weight.

    Returns:
        An array ``(*batch, m, n)``.
    """
    operands = (x, values, scales)
    registration.check_reduced("packed weights beside", operands)
    if out_sharding is None and _compat.is_sharded(*operands):
        sources: list[tuple[int, int] | None] = [(0, i) for i in range(x.ndim - 1)]
        sources.append(None if spec.n % TILE else (1, values.ndim - 4))
        out_sharding = _compat.sharding_from(operands, sources)
    shardings = None if out_sharding is None else [out_sharding]
    return registration.apply(packed_p, operands, spec, shardings)[0]


registration.evaluate_by_jit(packed_p)
registration.derive_first(packed_p)


# Abstract evaluation


def _abstract_eval(x: Any, values: Any, scales: Any, *, spec: PackedSpec) -> list[Any]:
    *batch, m, k = x.shape
    own = values.shape[:-4]
    shape = (tiles(spec.n), tiles(spec.k), 128, 4 * spec.bits)
    strips = (tiles(spec.n), spec.groups, 1 + spec.has_zeros, TILE)
    assert k == spec.k, (x.shape, spec)
    assert own in ((), tuple(batch)), (x.shape, values.shape)
    assert (values.shape, scales.shape) == ((*own, *shape), (*own, *strips)), (values, scales, spec)
    return [_compat.result_aval((x, values, scales), (*batch, m, spec.n), spec.out_dtype)]


packed_p.def_abstract_eval(_abstract_eval)


# Transposition


def _transpose(
    cotangents: Sequence[Any], x: Any, values: Any, scales: Any, *, spec: PackedSpec
) -> list[Any]:
    """Multiplies the cotangent by the transpose of the dequantized weight."""
    assert ad.is_undefined_primal(x), "linear in the left operand alone"
    (ct,) = cotangents
    if type(ct) is ad.Zero:
        return [None] * 3
    w = packed_layout.dequantized(values, scales, spec, x.aval.dtype)
    count = ct.ndim - 2
    w_batch = tuple(range(count)) if w.ndim > 2 else (None,) * count
    axes = Operands(tuple(range(ct.ndim)), (*w_batch, w.ndim - 1, w.ndim - 2))
    config = spec.config if spec.config == "xla" else None
    precision = _compat.canonicalize_precision(None)
    product = GemmSpec(axes, jnp.dtype(x.aval.dtype), precision, config=config)
    return [gemm.bind(Operands(ct, w), product)[0], None, None]


ad.primitive_transposes[packed_p] = _transpose


# Batching


def _batch(
    axis_data: Any, operands: Sequence[Any], dims: Sequence[int | None], *, spec: PackedSpec
) -> tuple[list[jax.Array], list[int | None]]:
    """Adds a batch dimension to all operands, or to ``x`` alone if the weight is not mapped."""
    x, values, scales = operands
    size, axis = axis_data.size, axis_data.explicit_mesh_axis
    x = batching.bdim_at_front(x, dims[0], size, axis)
    has_batch = values.ndim - (dims[1] is not None) > 4
    if dims[1] is dims[2] is None:
        if not has_batch:
            return [bind(x, values, scales, spec)], [0]
        x = jnp.moveaxis(x, 0, -3)  # (*batch, size, m, k); the new dimension joins the rows
        *batch, _, m, k = x.shape
        rows = bind(x.reshape(*batch, size * m, k), values, scales, spec)
        return [rows.reshape(*batch, size, m, spec.n)], [len(batch)]
    values = batching.bdim_at_front(values, dims[1], size, axis)
    scales = batching.bdim_at_front(scales, dims[2], size, axis)
    if has_batch or x.ndim == 3:
        return [bind(x, values, scales, spec)], [0]
    _, *batch, m, k = x.shape
    rows = bind(x.reshape(size, math.prod(batch) * m, k), values, scales, spec)
    return [rows.reshape(size, *batch, m, spec.n)], [0]


registration.batch(packed_p, _batch)


# Lowering

registration.lower(packed_p, reference=packed_lowering.reference, cuda=packed_lowering.lower_cuda)
rules.register(packed_p, division.rule(bind))
