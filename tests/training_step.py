"""The interface of a framework's training step, and the task that all frameworks learn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

ROWS, FEATURES, HIDDEN, CLASSES = 64, 96, 128, 80
RATE = 1e-3
DROPOUT = 0.1


class Framework(NamedTuple):
    """One framework's way to train.

    Attributes:
        start: returns a new state in a given dtype.
        step: the function that `jit` takes; `run` calls it.
        jit: the framework's own jit.
        run: runs a step, `run(compiled, state, x, y)`; returns the next state and the loss.
        observed: returns all arrays of a state, a pytree.
        jits_itself: whether the framework applies its `jit` where a test cannot intervene.
    """

    start: Callable[[Any], Any]
    step: Callable[..., Any]
    jit: Callable[[Any], Any]
    run: Callable[..., tuple[Any, Any]]
    observed: Callable[[Any], Any]
    jits_itself: bool = False


def batch() -> tuple[jax.Array, jax.Array]:
    """Returns features and labels that a model can learn."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal((ROWS, FEATURES)).astype(np.float32)
    y = (x @ rng.standard_normal((FEATURES, CLASSES))).argmax(-1)
    return jnp.asarray(x), jnp.asarray(y.astype(np.int32))


def cross_entropy(logits: jax.Array, y: jax.Array) -> jax.Array:
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def functional(compiled: Callable[..., Any], state: Any, x: Any, y: Any) -> tuple[Any, Any]:
    return compiled(state, x, y)


def itself(state: Any) -> Any:
    return state
