"""``unpacked_p``, the product with a weight in 4 bits that the program stores unpacked.

It reads the values and what ``pack_p`` makes of them. It is linear in the left operand. Its
derivative by the scales is that of the dequantized product. ``transforms.loops`` moves ``pack_p``
out of loops.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching

from jax_tcgemm import _compat
from jax_tcgemm.lowering import unpacked as lowering
from jax_tcgemm.primitives import gemm, registration
from jax_tcgemm.problem.packed import LayoutSpec, UnpackedSpec

unpacked_p = Primitive("tcgemm_unpacked")
unpacked_p.multiple_results = True
pack_p = Primitive("tcgemm_pack")


def bind(
    x: jax.Array,
    values: jax.Array,
    parts: Sequence[jax.Array],
    spec: UnpackedSpec,
    out_sharding: Any = None,
) -> jax.Array:
    """Packs the values and multiplies.

    Args:
        x: as in ``lowering.unpacked.reference``.
        values: the same.
        parts: the scales, and the zero points if there are any.
        spec: the static parameters.
        out_sharding: sharding of the result's type on a mesh with explicit axes.

    Returns:
        An array ``(..., n)``.
    """
    packed = registration.bind(pack_p, [values], LayoutSpec(spec.transposed), lowering.pack)
    return _product([x, values, packed, *parts], spec, out_sharding)


def _product(
    operands: Sequence[jax.Array], spec: UnpackedSpec, out_sharding: Any = None
) -> jax.Array:
    return registration.bind(unpacked_p, operands, spec, lowering.reference, out_sharding)[0]


registration.evaluate_by_jit(pack_p)
registration.evaluate_by_jit(unpacked_p)


def _abstract_eval(
    x: Any, values: Any, packed: Any, scale: Any, *zero: Any, spec: UnpackedSpec
) -> list[Any]:
    k, n = values.shape[::-1] if spec.transposed else values.shape
    assert x.shape[-1] == k, (x.shape, values.shape, spec)
    assert packed.shape == lowering.packed_shape(values, LayoutSpec(spec.transposed)), packed
    assert all(y.shape == (scale.shape[0], n) for y in (scale, *zero)), (scale.shape, zero)
    operands = (x, values, packed, scale, *zero)
    return [_compat.result_aval(operands, (*x.shape[:-1], n), spec.out_dtype)]


def _packed_aval(values: Any, *, spec: LayoutSpec) -> Any:
    shape = lowering.packed_shape(values, spec)
    return _compat.result_aval((values,), shape, jnp.dtype(jnp.uint8))


pack_p.def_abstract_eval(_packed_aval)
unpacked_p.def_abstract_eval(_abstract_eval)
_composed = functools.partial(lowering.dequantized, gemm.bind)
registration.derive_linear(unpacked_p, _composed, lambda spec: 1)
registration.transpose_composition(unpacked_p, _composed)


def _batch(
    axis_data: Any, operands: Sequence[Any], dims: Sequence[int | None], *, spec: UnpackedSpec
) -> tuple[list[jax.Array], list[int | None]]:
    """Turns a batch of left operands into rows; a batch of weights is dequantized."""
    if any(d is not None for d in dims[1:]):
        composed = functools.partial(_composed, spec=spec)
        return jax.vmap(composed, tuple(dims))(*operands), [0]
    size, axis = axis_data.size, axis_data.explicit_mesh_axis
    x = batching.bdim_at_front(operands[0], dims[0], size, axis)
    return [_product([x, *operands[1:]], spec)], [0]


def _batch_values(
    operands: Sequence[Any], dims: Sequence[int], *, spec: LayoutSpec
) -> tuple[jax.Array, int]:
    (values,), (dim,) = operands, dims
    values = jnp.moveaxis(values, dim, 0)
    return registration.bind(pack_p, [values], spec, lowering.pack), 0


registration.batch(unpacked_p, _batch)
batching.primitive_batchers[pack_p] = _batch_values


registration.lower(pack_p, reference=lowering.pack, cuda=lowering.pack_cuda, is_product=False)
registration.lower(
    unpacked_p,
    reference=lowering.reference,
    cuda=lowering.lower_cuda,
    divided=_composed,
    is_product=False,
)
