"""``Fp8State``: the scales of ``fp8_dot`` where they are made of earlier steps."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_tcgemm.api.quantization import Quantized, largest, saturated

_HISTORY = 1024


@jax.custom_batching.custom_vmap
def _amax(x: jax.Array, history: jax.Array) -> jax.Array:
    """Returns the largest magnitude of what belongs to each history: one, but under ``vmap``.

    Args:
        x: the leading dimensions of ``history``, and any others.
        history: any leading dimensions, and the steps.
    """
    axes = tuple(range(history.ndim - 1, x.ndim))
    return jnp.max(jnp.abs(x), axes, initial=0).astype(jnp.float32)


@_amax.def_vmap
def _amax_of_batch(
    axis_size: int, in_batched: list[bool], x: jax.Array, history: jax.Array
) -> tuple[jax.Array, bool]:
    """What is mapped while the history is not is all part of it."""
    is_x_batched, is_history_batched = in_batched
    if not is_x_batched:
        x = jnp.broadcast_to(x, (axis_size, *x.shape))
    if not is_history_batched:
        x = jnp.moveaxis(x, 0, history.ndim - 1)
    return _amax(x, history), is_history_batched


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DelayedScale:
    """The scale of one operand, made of its largest magnitudes in earlier steps.

    Attributes:
        scale: ``(1,)``, float32.
        amax_history: ``(steps,)``, float32, the latest step first.
    """

    scale: Any
    amax_history: Any

    @staticmethod
    def create(history: int = _HISTORY) -> DelayedScale:
        """Returns a scale of 1 and a history of zeros.

        Raises:
            ValueError: the history is to hold nothing.
        """
        if history < 1:
            raise ValueError(f"history={history} must be at least 1")
        return DelayedScale(jnp.ones(1, jnp.float32), jnp.zeros(history, jnp.float32))

    def updated(self, x: jax.Array, dtype: DTypeLike) -> DelayedScale:
        """Returns the scale to quantise ``x`` by, and the history with that of ``x`` in it.

        While the history is all zeros the scale stays. What is not finite does not enter it.
        """
        amax = jnp.max(self.amax_history)
        smallest = float(jnp.finfo(jnp.float32).smallest_normal)
        scale = jnp.maximum(amax / largest(dtype), smallest)
        scale = jnp.where((amax > 0) & jnp.isfinite(amax), scale, self.scale)
        latest = _amax(x, self.amax_history)
        latest = jnp.where(jnp.isfinite(latest), latest, 0)
        return DelayedScale(scale, jnp.concatenate([latest[None], self.amax_history[:-1]]))

    def quantize(self, x: jax.Array, dtype: DTypeLike) -> Quantized:
        """Quantises by the scale, clipping what exceeds the range of ``dtype``."""
        scale = self.scale.reshape((1,) * x.ndim)
        return Quantized(saturated(x.astype(jnp.float32), scale, dtype), scale, None, dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fp8State:
    """What delayed scaling carries from step to step for one product.

    Attributes:
        x: of the left operand.
        w: of the weights.
        gradient: of the cotangent of the result.
    """

    x: DelayedScale
    w: DelayedScale
    gradient: DelayedScale

    @staticmethod
    def create(history: int = _HISTORY) -> Fp8State:
        """Returns the state to begin with: scales of 1, histories of ``history`` zeros."""
        return Fp8State(*(DelayedScale.create(history) for _ in range(3)))
