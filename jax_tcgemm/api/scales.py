"""Scales of 8-bit operands: their accepted shapes, and how each is applied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_tcgemm.api import arguments
from jax_tcgemm.epilogue.spec import SCALE_BLOCK
from jax_tcgemm.problem.strides import Shape
from jax_tcgemm.quantized.arrays import divides, spread
from jax_tcgemm.quantized.scaled_array import ScaledArray

Pair = tuple[ScaledArray, ScaledArray]

# The contracted axes of operands that are not transposed.
_K_AXES = (-1, -2)


def with_scale(name: str, value: Any, operand_name: str, operand: jax.Array) -> ScaledArray:
    """Checks the scale of an operand and returns both.

    Args:
        name: name of the argument.
        value: the argument; ``None`` is a factor of 1.
        operand_name: name of the operand.
        operand: the operand that is scaled, ``(..., m, k)`` or ``(..., k, m)``.

    Returns:
        The operand with its scale in float32, which is not differentiated.

    Raises:
        TypeError: the scales are neither floating-point numbers nor a Python integer.
        ValueError: the shape of the scales does not fit.
    """
    if value is None:
        return ScaledArray(operand)
    x = arguments.array(name, value)
    is_number = x.weak_type and jnp.issubdtype(x.dtype, jnp.integer)
    if not (is_number or jnp.issubdtype(x.dtype, jnp.floating)):
        raise TypeError(f"{name} must be floating-point numbers, got {name}.dtype={x.dtype}")
    x = lax.stop_gradient(x.astype(jnp.float32))
    if x.size == 1:
        return ScaledArray(operand, x.reshape((1,) * operand.ndim))
    batch = zip(x.shape[:-2], operand.shape, strict=False)
    if not divides(x.shape, operand.shape) or any(own not in (1, n) for own, n in batch):
        raise ValueError(
            f"{name}.shape={x.shape} does not fit {operand_name}.shape={operand.shape}; accepted: "
            "one number, or as many dimensions, the last two of extents that divide the operand's, "
            "the others of 1 or the operand's"
        )
    return ScaledArray(operand, x)


def along_k(operands: Pair, transposed: tuple[bool, bool]) -> bool:
    """Checks if a scale changes along k."""
    pairs = zip(operands, _K_AXES, transposed, strict=True)
    return not all(x.is_constant_along(-3 - k if t else k) for x, k, t in pairs)


def are_kernel_blocks(operands: Pair, transposed: tuple[bool, bool]) -> bool:
    """Checks if kernels apply these scales as they accumulate: 1 x 128 of A, 128 x 128 of B."""
    (m, k), (_, n) = (_matrix(x.shape, t) for x, t in zip(operands, transposed, strict=True))
    blocks = [_matrix(x.scale_shape, t) for x, t in zip(operands, transposed, strict=True)]
    k_blocks, n_blocks = k // SCALE_BLOCK, n // SCALE_BLOCK
    is_whole = k % SCALE_BLOCK == n % SCALE_BLOCK == 0
    return is_whole and blocks == [(m, k_blocks), (k_blocks, n_blocks)]


def _matrix(shape: Shape, is_transposed: bool) -> Shape:
    """Returns the last two extents, in the order of an operand that is not transposed."""
    return shape[-2:][::-1] if is_transposed else shape[-2:]


def along_results(operands: Pair, transposed: tuple[bool, bool]) -> list[jax.Array]:
    """Returns the factors of rows, ``(..., m, 1)``, of columns, ``(..., 1, n)``, and of all.

    Single numbers come last.
    """
    along: list[jax.Array] = []
    numbers: list[jax.Array] = []
    for x, k_axis, is_transposed in zip(operands, _K_AXES, transposed, strict=True):
        if x.scale is None:
            continue
        if x.scale.size == 1:
            numbers.append(x.scale.reshape(()))
            continue
        mn_axis = k_axis if is_transposed else -3 - k_axis
        shape = [*x.scale.shape[:-2], 1, 1]
        shape[mn_axis] = x.shape[mn_axis]
        scale = spread(x.scale, tuple(shape))
        along.append(jnp.swapaxes(scale, -1, -2) if is_transposed else scale)
    return [*along, *numbers]


def alike(scale: jax.Array, x: jax.Array, batch: Sequence[int]) -> jax.Array:
    """Returns block scales with the batch dimensions that the operand will have."""
    scale = jnp.broadcast_to(scale, (*x.shape[:-2], *scale.shape[-2:]))
    own = batch[len(batch) - (x.ndim - 2) :]
    dropped = [i for i, extent in enumerate(own) if x.shape[i] == 1 and extent != 1]
    return lax.squeeze(scale, dropped) if dropped else scale
