"""What a training step of a framework is to a test, and the task that all of them learn."""

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
        start: returns what a step needs and makes anew, or changes, in a given dtype.
        step: what `jit` takes. It is called by `run`.
        jit: the framework's own.
        run: runs a step, `run(compiled, state, x, y)`; returns the next state and the loss.
        observed: returns all arrays of a state, a pytree.
        jits_itself: whether the framework applies its `jit` where nobody can come between.
    """

    start: Callable[[Any], Any]
    step: Callable[..., Any]
    jit: Callable[[Any], Any]
    run: Callable[..., tuple[Any, Any]]
    observed: Callable[[Any], Any]
    jits_itself: bool = False


def batch() -> tuple[jax.Array, jax.Array]:
    """Returns features and labels that can be learnt."""
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
