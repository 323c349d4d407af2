"""Makes random operands for measurements, without compiling anything."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm.tuning.lookup import Product

# Operands repeat after this many elements. The number is odd so that rows do not repeat.
_POOL = 2**21 - 9
# Consecutive operands begin this many elements apart (an odd number), modulo the pool.
_STEP = 149_797


class Numbers:
    """Pools of normally distributed numbers in host memory; operands are slices of a pool.

    Other types are made from the normal numbers: signed integers are the numbers times 30, rounded;
    unsigned integers are the magnitudes, rounded; booleans are true for positive numbers.

    Args:
        seed: equal seeds give equal slices.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._pools: dict[np.dtype, np.ndarray] = {}
        self._begin = 0
        self._lock = threading.Lock()

    def take(self, x: jax.ShapeDtypeStruct) -> jax.Array:
        """Returns an array of this type on the default device; each call gives other numbers."""
        count, dtype = math.prod(x.shape), np.dtype(x.dtype)
        with self._lock:
            pool = self._pool(dtype)
            if pool.size < _POOL + count:  # enlarged, so that each operand is one slice
                pool = self._pools[dtype] = np.resize(pool[:_POOL], _POOL + count)
            self._begin = begin = (self._begin + _STEP) % _POOL
        return jnp.asarray(pool[begin : begin + count].reshape(x.shape))

    def _pool(self, dtype: np.dtype) -> np.ndarray:
        if dtype not in self._pools:
            single = np.dtype(np.float32)
            self._pools[dtype] = (
                np.random.default_rng(self._seed).standard_normal(_POOL, single)
                if dtype == single
                else _converted(self._pool(single)[:_POOL], dtype)
            )
        return self._pools[dtype]


def _converted(normal: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if dtype == np.bool_:
        return normal > 0
    if jnp.issubdtype(dtype, jnp.integer):
        normal = np.round(np.abs(normal) if dtype.kind == "u" else normal * 30)
        least, most = jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
        return np.clip(normal, least, most).astype(dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return (normal + 1j * normal[::-1]).astype(dtype)
    return normal.astype(dtype)


def operand_sets(product: Product, numbers: Numbers, count: int) -> list[tuple[jax.Array, ...]]:
    """Returns ``count`` sets of operands of a product; all groups have the same size."""
    sizes_at = 2 if "ragged" in product.primitive else None

    def operand(i: int, x: jax.ShapeDtypeStruct) -> jax.Array:
        if i == sizes_at:
            return _even_sizes(x, rows=product.types[0].shape[0])
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            keys = jax.random.key(0, impl="threefry2x32")  # kernels support only threefry keys
            return jax.random.split(keys, math.prod(x.shape)).reshape(x.shape)
        return numbers.take(x)

    return [tuple(operand(i, x) for i, x in enumerate(product.types)) for _ in range(count)]


def size_of(types: Sequence[jax.ShapeDtypeStruct]) -> int:
    """Returns the total bytes of arrays of these types."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in types)


def _even_sizes(sizes: jax.ShapeDtypeStruct, rows: int) -> jax.Array:
    bounds = np.linspace(0, rows, sizes.shape[0] + 1).astype(int)
    return jnp.asarray(np.diff(bounds), sizes.dtype)
