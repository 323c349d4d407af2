"""A step of a model with random weights, and the parts that such steps share."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

BF16 = jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of the models; ``TINY`` is for tests.

    Attributes:
        scale: a divisor of widths and vocabularies.
        tokens: the length of a sequence, and the entries of a cache.
        sequences: the number of sequences in a batch.
    """

    scale: int = 1
    tokens: int = 1024
    sequences: int = 4


FULL, TINY = Sizes(), Sizes(scale=16, tokens=32, sequences=2)


@dataclasses.dataclass(frozen=True)
class Program:
    """A step.

    Attributes:
        step: maps the state and the inputs to the state, which is donated, and results.
        state: parameters and the optimizer's state, or a cache.
        inputs: the other arguments.
    """

    step: Callable[..., tuple[Any, Any]]
    state: Any
    inputs: tuple[Any, ...]


@functools.cache
def _pool() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(2**21 - 9).astype(np.float32)


def filled(types: Any, dtype: Any = None) -> Any:
    """Returns arrays of these types: small normal numbers, ones for vectors, zeros for integers."""
    starts = itertools.count(1, 99991)

    def one(x: Any) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.zeros(x.shape, x.dtype)
        # Each array starts at another place: equal weights would learn alike.
        numbers = np.roll(_pool(), next(starts)) if len(x.shape) > 1 else np.ones(1, np.float32)
        scale = 0.02 if len(x.shape) > 1 else 1.0
        return jnp.asarray((scale * np.resize(numbers, x.shape)).astype(dtype or x.dtype))

    return jax.tree.map(one, types)


def tokens_of(shape: tuple[int, ...], vocabulary: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).integers(0, vocabulary, shape), jnp.int32)


def normal(shape: tuple[int, ...], dtype: Any = BF16) -> jax.Array:
    return jnp.asarray(np.random.default_rng(2).standard_normal(shape, np.float32).astype(dtype))


def next_token_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    wide = logits[:, :-1].astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(wide, tokens[:, 1:]).mean()


def training(loss: Callable[..., jax.Array], parameters: Any, *inputs: Any) -> Program:
    """Returns the step of AdamW on a loss of the parameters and the inputs."""
    optimizer = optax.adamw(1e-4)

    def step(state: Any, *inputs: Any) -> tuple[Any, Any]:
        parameters, kept = state
        value, gradients = jax.value_and_grad(loss)(parameters, *inputs)
        updates, kept = optimizer.update(gradients, kept, parameters)
        return (optax.apply_updates(parameters, updates), kept), value

    return Program(step, (parameters, jax.jit(optimizer.init)(parameters)), inputs)
