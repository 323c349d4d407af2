"""Scales of 8-bit operands: their accepted shapes, and how each is applied."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_tcgemm.api import arguments
from jax_tcgemm.epilogue.spec import SCALE_BLOCK
from jax_tcgemm.quantized.arrays import spread


@dataclasses.dataclass(frozen=True)
class Scale:
    """The scales of one operand.

    Attributes:
        value: float32; of the operand's rank, or of shape ``()``; ``None`` means 1.
        blocks: number of blocks along ``(mn, k)``.
    """

    value: jax.Array | None = None
    blocks: tuple[int, int] = (1, 1)

    @property
    def is_along_k(self) -> bool:
        return self.blocks[1] > 1


def scale_of(name: str, value: Any, operand_name: str, operand: jax.Array, k_axis: int) -> Scale:
    """Checks the scales of an operand and returns them.

    Args:
        name: name of the argument.
        value: the argument; ``None`` is a factor of 1.
        operand_name: name of the operand.
        operand: the operand that is scaled.
        k_axis: contracted dimension of the operand, -1 or -2.

    Raises:
        TypeError: the scales are not floating-point numbers.
        ValueError: the shape of the scales does not fit.
    """
    if value is None:
        return Scale()
    x = arguments.array(name, value)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name} must be floating-point numbers, got {name}.dtype={x.dtype}")
    x = lax.stop_gradient(x.astype(jnp.float32))
    if x.size == 1:
        return Scale(x.reshape(()))
    pairs = list(zip(x.shape, operand.shape, strict=False))
    fits = x.ndim == operand.ndim and all(
        own == extent or (own > 0 and extent % own == 0) for own, extent in pairs
    )
    if not fits or any(own not in (1, extent) for own, extent in pairs[:-2]):
        raise ValueError(
            f"{name}.shape={x.shape} does not fit {operand_name}.shape={operand.shape}; accepted: "
            "one number, or as many dimensions, the last two of extents that divide the operand's, "
            "the others of 1 or the operand's"
        )
    mn_axis = -3 - k_axis
    return Scale(x, (x.shape[mn_axis], x.shape[k_axis]))


def dequantized(x: jax.Array, scale: Scale, dtype: Any) -> jax.Array:
    """Returns an operand times its scales, in ``dtype``."""
    wide = x.astype(jnp.float32)
    if scale.value is not None:
        wide = wide * (spread(scale.value, x.shape) if scale.value.ndim else scale.value)
    return wide.astype(dtype)


def are_kernel_blocks(a: Scale, b: Scale, m: int, n: int, k: int) -> bool:
    """Checks if kernels apply these scales as they accumulate: 1 x 128 of A, 128 x 128 of B."""
    k_blocks = k // SCALE_BLOCK
    return (
        k % SCALE_BLOCK == n % SCALE_BLOCK == 0
        and a.blocks == (m, k_blocks)
        and b.blocks == (n // SCALE_BLOCK, k_blocks)
    )


def along_results(
    scales: tuple[Scale, Scale],
    operands: tuple[jax.Array, jax.Array],
    transposed: tuple[bool, bool],
) -> list[jax.Array]:
    """Returns the factors of rows, of columns and of the whole product.

    Single numbers come last.
    """
    along: list[jax.Array] = []
    numbers: list[jax.Array] = []
    for i, (scale, x, is_transposed) in enumerate(zip(scales, operands, transposed, strict=True)):
        value = scale.value
        if value is None or not value.ndim:
            numbers += [] if value is None else [value]
            continue
        # k has extent 1: (..., m, 1) of A, (..., 1, n) of B.
        mn_axis = -1 if is_transposed == (i == 0) else -2
        shape = [*value.shape[:-2], 1, 1]
        shape[mn_axis] = x.shape[mn_axis]
        value = spread(value, tuple(shape))
        along.append(jnp.swapaxes(value, -1, -2) if is_transposed else value)
    return [*along, *numbers]


def alike(scale: jax.Array, x: jax.Array, batch: Sequence[int]) -> jax.Array:
    """Returns block scales with the batch dimensions that the operand will have."""
    scale = jnp.broadcast_to(scale, (*x.shape[:-2], *scale.shape[-2:]))
    own = batch[len(batch) - (x.ndim - 2) :]
    dropped = [i for i, extent in enumerate(own) if x.shape[i] == 1 and extent != 1]
    return lax.squeeze(scale, dropped) if dropped else scale
