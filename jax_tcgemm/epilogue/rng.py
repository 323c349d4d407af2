"""Random numbers of functions: threefry keys, their words, and random bits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import random

from jax_tcgemm._compat import jaxprs

_THREEFRY = "threefry2x32"

# Operations that draw random numbers.
DRAWS = frozenset({"random_bits", _THREEFRY})

wrapped = functools.partial(jax.random.wrap_key_data, impl=_THREEFRY)

# The functions that make a key or its words, by the name of the operation.
KEYS: Mapping[str, Callable[..., Any]] = {
    "random_wrap": wrapped,
    "random_unwrap": jax.random.key_data,
    "random_seed": functools.partial(jax.random.key, impl=_THREEFRY),
    "random_fold_in": jax.random.fold_in,
}


def is_key(dtype: Any) -> bool:
    """Checks if a dtype is that of threefry keys."""
    return str(dtype) == "key<fry>"


def partitionable() -> bool:
    """Checks if a number of ``random_bits`` that is drawn now depends only on its count."""
    return bool(jax.config.jax_threefry_partitionable)  # pyright: ignore


def is_partitionable(eqn: Any) -> bool:
    """Checks if a number of this ``random_bits`` depends only on its count."""
    return bool(jaxprs.context_of(eqn)[1])


def word_type(array: Any) -> jax.ShapeDtypeStruct:
    """Returns the type that an array has after ``words``."""
    if is_key(array.dtype):
        return jax.ShapeDtypeStruct((*array.shape, 2), jnp.uint32)
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def words(arrays: Sequence[Any]) -> list[Any]:
    """Replaces keys by their words, which any program can take; keeps other arrays."""
    return [jax.random.key_data(x) if is_key(jax.typeof(x).dtype) else x for x in arrays]


def bits(key: jax.Array, counts: jax.Array, width: int) -> jax.Array:
    """Draws the numbers that ``jax.random.bits`` has at these counts of an array.

    ``jax.random.bits`` must be partitionable.

    Args:
        key: the key.
        counts: the counts, uint32.
        width: bits of a number: 8, 16 or 32.
    """
    first, second = random.threefry2x32_p.bind(
        *jax.random.key_data(key), jnp.zeros_like(counts), counts
    )
    return (first ^ second).astype(f"uint{width}")
