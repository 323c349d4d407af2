"""Attention of a decode step, for the tests of products with caches."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_tcgemm import fuse
from jax_tcgemm.transforms import caches

# Sequences, entries, heads of the cache, heads of the queries for each, and the extent of a head.
B, T, G, R, D = 3, 40, 2, 4, 16
BF16, F32 = jnp.bfloat16, jnp.float32


LIMITS = ("_LEAST_BYTES", "_LEAST_REPEATED_BYTES", "_LEAST_BYTES_OF_ONE", "_LEAST_HEAD")


def any_size(monkeypatch: Any) -> None:
    """Lets small caches count as large ones."""
    for name in LIMITS:
        monkeypatch.setattr(caches, name, 1)


def updated(keys, values, new):
    at = (0, 3, 0, 0)
    return lax.dynamic_update_slice(keys, new, at), lax.dynamic_update_slice(values, new, at)


def repeated(keys, values, q, new):
    """Attention as transformers' Flax models have it: heads of the cache are repeated."""
    keys, values = updated(keys, values, new)
    k, v = (jnp.repeat(x, R, axis=2) for x in (keys, values))
    scores = jnp.einsum("...qhd,...khd->...hqk", q.astype(F32) / 4, k.astype(F32))
    y = jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(scores).astype(BF16), v)
    return y, keys, values


def grouped(keys, values, q, new):
    keys, values = updated(keys, values, new)
    return jax.nn.dot_product_attention(q, keys, values), keys, values


def in_kernels(f, *args: Any) -> int:
    return sum("cache once" in each.reason for each in fuse(f).report(*args))
