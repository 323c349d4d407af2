"""How reshapes, transposes and broadcasts spread a stored array."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tcgemm.transforms.graph import graph_of
from jax_tcgemm.transforms.spread import Spread


@pytest.mark.any_jax
def test_spreads():
    x = jnp.arange(24).reshape(4, 6)
    spread = Spread.of(x.shape)
    assert spread.reshaped((2, 12)).shape == (2, 12)
    np.testing.assert_array_equal(spread.reshaped((3, 8)).applied(x), x.reshape(3, 8))
    turned = Spread((spread.axes[1], spread.axes[0]))
    np.testing.assert_array_equal(turned.reshaped((2, 12)).applied(x), x.T.reshape(2, 12))
    assert turned.reshaped((4, 6)) is None


def _indices(spread):
    """Returns the number of the stored element for each element of the spread."""
    flat = [factor for factors in spread.axes for factor in factors]
    grid = np.indices([n for n, _ in flat]).reshape(len(flat), -1)
    numbers = np.array([stride for _, stride in flat], int) @ grid if flat else np.zeros(1, int)
    return numbers.reshape(spread.shape)


def _moved(rng, shape):
    """Returns a random operation, on arrays of a shape, of NumPy or JAX."""
    kind = rng.integers(3)
    if kind == 0:
        order = tuple(rng.permutation(len(shape)))
        return lambda xp, x: xp.transpose(x, order)
    if kind == 1:
        extents = [int(n) for n in rng.permutation([2, 3, 2, 1, *shape])[:2]]
        size = math.prod(shape)
        while size % math.prod(extents):
            extents.pop()
        new = tuple(rng.permutation([*extents, size // math.prod(extents)]))
        return lambda xp, x: xp.reshape(x, new)
    new = (int(rng.integers(1, 4)), *(n if n > 1 else int(rng.integers(1, 3)) for n in shape))
    return lambda xp, x: xp.broadcast_to(x, new)


@pytest.mark.any_jax
def test_spreads_follow_random_operations(rng):
    followed = 0
    for _ in range(60):
        x = np.arange(24).reshape([(4, 6), (24,), (2, 1, 12), (3, 4, 2)][rng.integers(4)])
        spread = Spread.of(x.shape)
        for _ in range(rng.integers(1, 5)):
            moved = _moved(rng, x.shape)
            closed = jax.make_jaxpr(functools.partial(moved, jnp))(x)
            x = moved(np, x)
            for node in graph_of(closed.jaxpr, closed.consts).items:
                spread = None if spread is None else spread.after(node)
        if spread is not None and x.size <= 1000:
            followed += 1
            np.testing.assert_array_equal(_indices(spread), x)
            if spread.is_in_blocks:
                blocks = spread.applied(np.arange(24))
                counts = zip(x.shape, blocks.shape, strict=True)
                for axis, (n, count) in enumerate(counts):
                    blocks = np.repeat(blocks, n // count, axis)
                np.testing.assert_array_equal(blocks, x)
    assert followed > 20
