"""Helpers that inspect the module and the calls that `cuda_module` returns."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

_MOVES = ("stablehlo.transpose", "stablehlo.convert", "stablehlo.broadcast", "stablehlo.slice")


class Gpu:
    """A device as `_compat.initialized_cuda_devices` lists it."""

    device_kind = "a GPU"

    def __init__(self, compute_capability: str):
        self.compute_capability = compute_capability


def bf16(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.bfloat16)


def picked(call: dict[str, Any], *names: str) -> tuple[Any, ...]:
    """Returns the values of these attributes."""
    return tuple(call[name] for name in names)


def assert_nothing_moves(text: str) -> None:
    """Checks that the module has no operation that copies an operand."""
    assert not [op for op in _MOVES if op in text], text
