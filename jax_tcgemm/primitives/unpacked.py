"""``unpacked_p``, the product with a weight in 4 bits that the program stores unpacked.

The primitive is linear in the left operand. Its derivative by the scales is that of the dequantized
product.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching

from jax_tcgemm import _compat
from jax_tcgemm.lowering import unpacked as lowering
from jax_tcgemm.primitives import gemm, registration
from jax_tcgemm.problem.packed import UnpackedSpec

unpacked_p = Primitive("tcgemm_unpacked")
unpacked_p.multiple_results = True


def bind(operands: Sequence[jax.Array], spec: UnpackedSpec, out_sharding: Any = None) -> jax.Array:
    """Applies the primitive.

    Args:
        operands: ``x``, values, scales, and zero points if there are any, as in
            ``lowering.unpacked.reference``.
        spec: the static parameters.
        out_sharding: sharding of the result's type on a mesh with explicit axes.

    Returns:
        An array ``(..., n)``.
    """
    return registration.bind(unpacked_p, operands, spec, lowering.reference, out_sharding)[0]


registration.evaluate_by_jit(unpacked_p)


def _abstract_eval(x: Any, values: Any, scale: Any, *zero: Any, spec: UnpackedSpec) -> list[Any]:
    k, n = values.shape[::-1] if spec.transposed else values.shape
    assert x.shape[-1] == k, (x.shape, values.shape, spec)
    assert all(y.shape == (scale.shape[0], n) for y in (scale, *zero)), (scale.shape, zero)
    return [_compat.result_aval((x, values, scale, *zero), (*x.shape[:-1], n), spec.out_dtype)]


unpacked_p.def_abstract_eval(_abstract_eval)
registration.derive_linear(unpacked_p, lowering.reference, lambda spec: 1)
registration.transpose_composition(unpacked_p, lowering.reference)


def _batch(
    axis_data: Any, operands: Sequence[Any], dims: Sequence[int | None], *, spec: UnpackedSpec
) -> tuple[list[jax.Array], list[int | None]]:
    """Turns a batch of left operands into rows; a batch of weights is dequantized."""
    if all(d is None for d in dims):
        return [bind(operands, spec)], [None]
    if any(d is not None for d in dims[1:]):
        composed = functools.partial(lowering.reference, spec=spec)
        return jax.vmap(composed, tuple(dims))(*operands), [0]
    size, axis = axis_data.size, axis_data.explicit_mesh_axis
    x = batching.bdim_at_front(operands[0], dims[0], size, axis)
    return [bind([x, *operands[1:]], spec)], [0]


batching.fancy_primitive_batchers[unpacked_p] = _batch


def _divided(*operands: jax.Array, spec: UnpackedSpec) -> list[jax.Array]:
    """Dequantizes the weight, so that an ordinary product is divided among devices."""
    return list(gemm.bind(*lowering.product_of_dequantized(*operands, spec=spec)))


registration.lower(
    unpacked_p,
    reference=lowering.reference,
    cuda=lowering.lower_cuda,
    divided=_divided,
    is_product=False,
)
