"""An attention layer with rotary embedding, as users write it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

SIZE = 32


def split(x: jax.Array) -> jax.Array:
    """Returns ``(batch, sequence, heads, SIZE)``."""
    return x.reshape(*x.shape[:2], -1, SIZE)


def rotated(x: jax.Array) -> jax.Array:
    """Rotates pairs of each head's numbers by an angle that depends on the sequence position."""
    angle = jnp.arange(x.shape[1])[:, None, None] / 10000 ** (jnp.arange(SIZE) / SIZE)
    wide = x.astype(jnp.float32)
    half = jnp.concatenate([-wide[..., SIZE // 2 :], wide[..., : SIZE // 2]], -1)
    return (wide * jnp.cos(angle) + half * jnp.sin(angle)).astype(x.dtype)


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Returns the values, weighted by the softmax of the scores."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * SIZE**-0.5
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(q.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def layer(x: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Returns attention of ``x`` with three weights; the heads have their own dimension."""
    return attention(rotated(split(x @ q)), rotated(split(x @ k)), split(x @ v))
