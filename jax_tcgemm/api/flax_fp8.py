"""``Fp8DotGeneral``: ``fp8_dot`` for the layers of ``flax.linen``.

This module needs Flax, so the package does not import it: ``from jax_tcgemm.api.flax_fp8 import
Fp8DotGeneral``, then ``nn.Dense(features, dot_general_cls=Fp8DotGeneral)``.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax.typing import ArrayLike, DTypeLike

from jax_tcgemm.api.delayed_scaling import DelayedScale, Fp8State
from jax_tcgemm.api.fp8 import fp8_dot_general


class Fp8DotGeneral(nn.Module):
    """The ``dot_general_cls`` of a layer: its products in float8, forward and backward.

    The variables of delayed scaling have the names and shapes of those of ``flax.linen.fp8_ops``.
    They are in the collection ``_overwrite_with_gradient``, whose gradients are its new values;
    ``flax.training.train_state.TrainState`` treats them so. Other recipes have no variables:
    ``functools.partial(Fp8DotGeneral, recipe="block")``.

    Attributes:
        recipe: as in ``fp8_dot``.
        power_of_two: as in ``fp8_dot``.
        amax_history_length: number of steps in the history of delayed scaling.
    """

    recipe: str = "delayed"
    power_of_two: bool = False
    amax_history_length: int = 1024

    @nn.compact
    def __call__(
        self,
        lhs: ArrayLike,
        rhs: ArrayLike,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
        **kwargs: Any,
    ) -> jax.Array:
        """Computes ``fp8_dot_general`` of these arguments."""
        state = None
        if self.recipe == "delayed":
            state = Fp8State(*map(self._scale, ("input", "kernel", "output_grad")))
        return fp8_dot_general(
            lhs,
            rhs,
            dimension_numbers,
            precision,
            preferred_element_type,
            recipe=self.recipe,
            state=state,
            power_of_two=self.power_of_two,
            **kwargs,
        )

    def _scale(self, name: str) -> DelayedScale:
        def variable(suffix: str, initial: jax.Array) -> jax.Array:
            path = OVERWRITE_WITH_GRADIENT, f"{name}_{suffix}"
            return self.variable(*path, lambda: initial).value

        history = jnp.zeros(self.amax_history_length, jnp.float32)
        return DelayedScale(
            variable("scale", jnp.ones(1, jnp.float32)), variable("amax_history", history)
        )
