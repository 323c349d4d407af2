"""Projections to attention heads under ``fuse``: kernels write the sequence dimension last."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from fusions import check, operations
from rotary_attention import SIZE, attention, layer, rotated, split

from jax_tcgemm import fuse

B, S, HEADS = 2, 96, 3
K = HEADS * SIZE


@pytest.fixture
def arrays(normal):
    """Returns ``x``, and the weights of q, k and v."""
    x = normal(B, S, K, dtype=jnp.bfloat16)
    return [x, *(normal(K, K, dtype=jnp.bfloat16) / 4 for _ in range(3))]


def sequence_last(f, *args):
    return sum("sequence last" in each.reason for each in fuse(f).report(*args))


def test_the_projections_of_a_layer_with_rotary_embedding(arrays):
    assert sequence_last(layer, *arrays) == 3
    assert operations(fuse(layer), *arrays)["dot_general"] == 2
    check(layer, *arrays, slack=4)


def test_weights_that_are_kept_transposed(arrays):
    def f(x, *weights):
        return layer(x, *(w.T for w in weights))

    assert sequence_last(f, *arrays) == 3
    check(f, *arrays, slack=4)


def test_their_gradients(arrays):
    def loss(*args):
        return jnp.sin(layer(*args).astype(jnp.float32)).mean()

    step = jax.grad(loss, argnums=(0, 1, 2, 3))
    assert sequence_last(step, *arrays) == 3
    check(step, *arrays, slack=8)


def test_under_vmap_and_scan(arrays):
    x, *weights = arrays
    batched = jax.vmap(fuse(layer), (None, 0, 0, 0))
    stacked = [jnp.stack([w, w + w]) for w in weights]
    check(lambda *args: batched(*args), x, *stacked, slack=4)

    def layers(x, *weights):
        def body(h, each):
            return layer(h, *each).reshape(h.shape), None

        return jax.lax.scan(body, x, weights)[0]

    assert sequence_last(layers, x, *stacked) == 3
    check(layers, x, *stacked, slack=8)


def grouped(x, q, k, v):
    """The heads of ``q`` share a head of ``k`` and ``v``."""
    queries = rotated(split(x @ q)).reshape(B, S, 1, HEADS, SIZE)
    scores = jnp.einsum("bqghd,bkgd->bghqk", queries, rotated(split(x @ k))[:, :, :1])
    return jnp.einsum("bghqk,bkgd->bqghd", scores, split(x @ v)[:, :, :1])


def normalised(x, q, k, v):
    q = split(x @ q)
    return attention(q / jnp.sum(q * q, -1, keepdims=True), split(x @ k), split(x @ v))


def returned(x, q, k, v):
    k, v = split(x @ k), split(x @ v)
    return attention(rotated(split(x @ q)), rotated(k), v), jnp.sort(k)


def scaled(x, q, k, v):
    return attention(split(jnp.tanh(x @ q)), rotated(split(x @ k)), split(x @ v))


@pytest.mark.parametrize(
    ("f", "expected"), [(grouped, 2), (normalised, 2), (returned, 2), (scaled, 2)]
)
def test_what_others_read_or_attention_reads_otherwise(arrays, f, expected):
    assert sequence_last(f, *arrays) == expected
    check(f, *arrays, slack=4)


def test_short_sequences_and_odd_extents(normal, arrays):
    _, *weights = arrays
    for sequence in (64, 91):
        x = normal(B, sequence, K, dtype=jnp.bfloat16)
        assert sequence_last(layer, x, *weights) == 0
