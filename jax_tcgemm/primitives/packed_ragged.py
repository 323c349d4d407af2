"""``packed_ragged_p``, groups of rows times packed weights, and its rule under transformations.

The primitive is linear in the left operand. The weights have no derivative.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad

from jax_tcgemm import _compat
from jax_tcgemm.lowering import packed_layout
from jax_tcgemm.lowering import packed_ragged as lowering
from jax_tcgemm.partitioning import packed_ragged as division
from jax_tcgemm.partitioning import rules
from jax_tcgemm.primitives import gemm, ragged, registration
from jax_tcgemm.problem.packed import TILE, PackedSpec, tiles
from jax_tcgemm.problem.strides import Operands

packed_ragged_p = Primitive("tcgemm_packed_ragged")
packed_ragged_p.multiple_results = True


def bind(spec: PackedSpec, *operands: jax.Array, out_sharding: Any = None) -> list[jax.Array]:
    """Applies the primitive.

    Args:
        spec: the static parameters.
        *operands: the left operand ``(m, k)``, packed values and scales with a leading dimension
            ``g``, and the sizes of the groups, ``(g,)``, int32.
        out_sharding: sharding of the result's type on a mesh with explicit axes. By default rows
            are sharded like those of the left operand, and columns like those of the weights.

    Returns:
        One array ``(m, n)``.
    """
    registration.check_reduced("packed weights beside", operands)
    if out_sharding is None and _compat.is_sharded(*operands):
        columns = None if spec.n % TILE else (1, 1)
        out_sharding = _compat.sharding_from(operands, [(0, 0), columns])
    shardings = None if out_sharding is None else [out_sharding]
    return registration.apply(packed_ragged_p, operands, spec, shardings)


registration.evaluate_by_jit(packed_ragged_p)
registration.derive_first(packed_ragged_p)


# Abstract evaluation


def _abstract_eval(
    x: Any, values: Any, scales: Any, group_sizes: Any, *, spec: PackedSpec
) -> list[Any]:
    m, k = x.shape
    (count,) = group_sizes.shape
    shape = (count, tiles(spec.n), tiles(spec.k), 128, 4 * spec.bits)
    strips = (count, tiles(spec.n), spec.groups, 1 + spec.has_zeros, TILE)
    assert k == spec.k, (x.shape, spec)
    assert (values.shape, scales.shape) == (shape, strips), (values, scales, group_sizes, spec)
    operands = (x, values, scales, group_sizes)
    return [_compat.result_aval(operands, (m, spec.n), spec.out_dtype)]


packed_ragged_p.def_abstract_eval(_abstract_eval)


# Transposition


def _transpose(
    cotangents: Sequence[Any],
    x: Any,
    values: Any,
    scales: Any,
    group_sizes: Any,
    *,
    spec: PackedSpec,
) -> list[Any]:
    """Multiplies the cotangent by the transposes of the dequantized weights."""
    assert ad.is_undefined_primal(x), "linear in the left operand alone"
    (ct,) = cotangents
    if type(ct) is ad.Zero:
        return [None] * 4
    dtype = jnp.dtype(x.aval.dtype)
    w = packed_layout.dequantized(values, scales, spec, dtype)
    if dtype.itemsize == 2:  # kernels multiply operands of one type
        ct = ct.astype(dtype)
    product = lowering.of_dequantized(spec, transpose_rhs=True)
    product = dataclasses.replace(product, out_dtype=dtype)
    return [gemm.bind(Operands(ct, w, group_sizes), product)[0], None, None, None]


ad.primitive_transposes[packed_ragged_p] = _transpose


# Batching, lowering and division

ragged.batch_one_by_one(packed_ragged_p)
registration.lower(packed_ragged_p, reference=lowering.reference, cuda=lowering.lower_cuda)
rules.register(packed_ragged_p, division.rule(bind))
