"""Random operands for measurements."""

from __future__ import annotations

import functools
import math

import jax
import numpy as np

_STEP = 2**20


class Numbers:
    """Normal numbers, of which operands are pieces: to draw them anew for each takes a second.

    Args:
        seed: equal seeds give equal pieces.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._pools: dict[np.dtype, jax.Array] = {}
        self._begin = 0

    def take(self, x: jax.ShapeDtypeStruct) -> jax.Array:
        """Returns a copy of other numbers than the last time, as far as there are any."""
        count = math.prod(x.shape)
        pool = self._pools.get(x.dtype)
        if pool is None or pool.size < count + _STEP:
            size = _STEP + max(_STEP, 1 << count.bit_length())
            # Of JAX's generators, rbg is compiled and run in the least time.
            key = jax.random.fold_in(jax.random.key(self._seed, impl="rbg"), size)
            pool = self._pools[x.dtype] = jax.random.normal(key, (size,), x.dtype)
        self._begin = (self._begin + _STEP // 7 + 1) % (pool.size - count)
        return _piece(pool, self._begin, x.shape)


@functools.partial(jax.jit, static_argnums=2)
def _piece(pool: jax.Array, begin: int, shape: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_slice(pool, (begin,), (math.prod(shape),)).reshape(shape)
