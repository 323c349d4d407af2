"""``Fp8State``: scales of ``fp8_dot`` that are computed from earlier steps."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_tcgemm.api.quantization import largest, not_nan, saturated
from jax_tcgemm.quantized.arrays import Quantized

_HISTORY = 1024


@jax.custom_batching.custom_vmap
def _amax(x: jax.Array, history: jax.Array) -> jax.Array:
    """Returns the largest magnitude for each history: one history, or several under ``vmap``.

    Args:
        x: has the leading dimensions of ``history``, then any others.
        history: has any leading dimensions, then the steps.
    """
    axes = tuple(range(history.ndim - 1, x.ndim))
    return jnp.max(not_nan(jnp.abs(x)), axes, initial=0).astype(jnp.float32)


@_amax.def_vmap
def _amax_of_batch(
    axis_size: int, in_batched: list[bool], x: jax.Array, history: jax.Array
) -> tuple[jax.Array, bool]:
    """Reduces over a mapped axis of ``x`` if the history is not mapped."""
    is_x_batched, is_history_batched = in_batched
    if not is_x_batched:
        x = jnp.broadcast_to(x, (axis_size, *x.shape))
    if not is_history_batched:
        x = jnp.moveaxis(x, 0, history.ndim - 1)
    return _amax(x, history), is_history_batched


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DelayedScale:
    """The scale of one operand, computed from its largest magnitudes in earlier steps.

    Attributes:
        scale: ``(1,)``, float32.
        amax_history: ``(steps,)``, float32, the latest step first.

    Example:
        >>> scale_of_w = Fp8State.create().w
        >>> scale_of_w.scale.shape, scale_of_w.amax_history.shape
        ((1,), (1024,))
    """

    scale: Any
    amax_history: Any

    @staticmethod
    def create(history: int = _HISTORY) -> DelayedScale:
        """Returns a scale of 1 and a history of zeros.

        Raises:
            ValueError: ``history`` is less than 1.
        """
        if history < 1:
            raise ValueError(f"history={history} must be at least 1")
        return DelayedScale(jnp.ones(1, jnp.float32), jnp.zeros(history, jnp.float32))

    def updated(self, x: jax.Array, dtype: DTypeLike) -> DelayedScale:
        """Returns the scale for quantizing ``x``, and a history that includes ``x``.

        The scale stays the same while the history is all zeros; if it is 0, it becomes 1. A largest
        magnitude that is not finite enters the history as 0.
        """
        amax = jnp.max(self.amax_history)
        smallest = float(jnp.finfo(jnp.float32).smallest_normal)
        scale = jnp.maximum(amax / largest(dtype), smallest)
        # A scale is 0 where nothing used the state in the step before: its gradient is zeros.
        old = jnp.where(self.scale > 0, self.scale, 1)
        scale = jnp.where((amax > 0) & jnp.isfinite(amax), scale, old)
        latest = _amax(x, self.amax_history)
        latest = jnp.where(jnp.isfinite(latest), latest, 0)
        return DelayedScale(scale, jnp.concatenate([latest[None], self.amax_history[:-1]]))

    def quantize(self, x: jax.Array, dtype: DTypeLike) -> Quantized:
        """Quantizes ``x`` by the scale and clips values beyond the range of ``dtype``."""
        scale = self.scale.reshape((1,) * x.ndim)
        return Quantized(saturated(x.astype(jnp.float32), scale, dtype), scale, None, dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fp8State:
    """The state that delayed scaling carries from step to step for one product.

    Attributes:
        x: scale of the left operand.
        w: scale of the weights.
        gradient: scale of the result's cotangent.

    Example:
        >>> state = Fp8State.create()
        >>> loss = lambda w, state: fp8_dot(x, w, recipe="delayed", state=state).sum()
        >>> dw, state = jax.grad(loss, (0, 1))(w, state)  # the gradient and the next state
    """

    x: DelayedScale
    w: DelayedScale
    gradient: DelayedScale

    @staticmethod
    def create(history: int = _HISTORY) -> Fp8State:
        """Returns the initial state: scales of 1 and histories of ``history`` zeros."""
        return Fp8State(*(DelayedScale.create(history) for _ in range(3)))


# Exported programs may have states as arguments; all that these classes hold are arrays.
for _class in (DelayedScale, Fp8State):
    jax.export.register_pytree_node_serialization(
        _class,
        serialized_name=f"jax_tcgemm.{_class.__name__}",
        serialize_auxdata=lambda _: b"",
        deserialize_auxdata=lambda _: (),
    )
