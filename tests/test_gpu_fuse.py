"""``fuse`` on a GPU: kernels with the epilogues that it finds, and their results."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fusions import layer_arrays, operands, random_function, worst, worst_of_random
from rotary_attention import SIZE, layer

from jax_tcgemm import fuse
from jax_tcgemm.transforms import neighbours

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

M, K, N = 640, 256, 384


def kernels(f: Any, *args: Any) -> int:
    """Counts the products that are compiled with an epilogue."""
    return jax.jit(fuse(f)).lower(*args).as_text().count("custom_call @jax_tcgemm_compiled_gemm")


@pytest.fixture
def arrays(normal):
    return layer_arrays(normal, M, K, N)


def mlp(x, w, b, d):
    return x + jax.nn.gelu(x @ w + b) @ d


def gated(x, w, u, d):
    return x + (jax.nn.silu(x @ w) * (x @ u)) @ d


def stepped(layer):
    """Returns two layers in a scan, rematerialized in the backward pass, with all gradients."""

    def loss(x, *weights):
        body = jax.checkpoint(lambda h, _: (layer(h, *weights), None))
        y = jax.lax.scan(body, x, None, length=2)[0]
        return jnp.mean(y.astype(jnp.float32) ** 2)

    return jax.value_and_grad(loss, argnums=(0, 1, 2, 3))


@pytest.mark.parametrize(
    ("f", "names", "count"),
    [(mlp, "xwbd", 2), (gated, "xwud", 2), (stepped(mlp), "xwbd", 4), (stepped(gated), "xwud", 4)],
    ids=["mlp", "gated", "mlp step", "gated step"],
)
def test_layers(arrays, f, names, count):
    args = [arrays[name] for name in names]
    assert kernels(f, *args) >= count
    assert worst(f, fuse(f), args) <= 1


@pytest.mark.parametrize("part", range(6))
def test_random_functions(rng, part):
    function, args = random_function(rng), operands(rng, 128)
    assert worst_of_random(function, args, gradient=part % 2 == 0) <= 1, function


@pytest.mark.parametrize("count", [3, 6, 8])
@pytest.mark.parametrize("wide", [False, True])
def test_many_matrices_beside_the_product(normal, count, wide):
    """The matrices take much shared memory, so fewer rows of the table have room."""
    dtype = jnp.float32 if wide else jnp.bfloat16
    x, w = normal(M, K, dtype=jnp.bfloat16) / 8, normal(K, N, dtype=jnp.bfloat16) / 8
    others = [normal(M, N, dtype=dtype) for _ in range(count)]

    def f(x, w, *others):
        y = (x @ w).astype(jnp.float32)
        for i, other in enumerate(others):
            y = jnp.sin(y) * other + i
        return y.astype(jnp.bfloat16), jnp.cos(y), y.sum(0)

    assert worst(f, fuse(f), (x, w, *others), slack=4) <= 1


def test_dropout_keeps_what_it_keeps(normal):
    m, n = 8192, 4096  # XLA draws fewer numbers in a separate kernel
    x, w = normal(m, K, dtype=jnp.bfloat16), normal(K, n, dtype=jnp.bfloat16)

    def f(x, w):
        kept = jax.random.bernoulli(jax.random.key(1), 0.9, (m, n))
        return jnp.where(kept, x @ w / 0.9, 0).astype(x.dtype)

    assert kernels(f, x, w) == 1
    ours, theirs = jax.jit(fuse(f))(x, w), jax.jit(f)(x, w)
    np.testing.assert_array_equal(np.asarray(ours == 0), np.asarray(theirs == 0))


def test_groups(normal):
    x, w = normal(M, K, dtype=jnp.bfloat16) / 8, normal(3, K, N, dtype=jnp.bfloat16) / 8
    sizes = jnp.array([200, 240, 200], jnp.int32)

    def f(x, w, sizes):
        hidden = jax.nn.silu(jax.lax.ragged_dot(x, w, sizes))
        return (hidden @ hidden.T).astype(jnp.float32).sum()

    step = jax.value_and_grad(f, argnums=(0, 1))
    assert kernels(f, x, w, sizes) >= 1
    assert worst(step, fuse(step), (x, w, sizes)) <= 1


@pytest.mark.parametrize("sequence", [72, 256, 1000])
@pytest.mark.parametrize("heads", [4, 7])
def test_projections_of_attention(normal, sequence, heads, monkeypatch):
    """The kernels write the sequence last; gradients read XLA's results of these."""
    monkeypatch.setattr(neighbours, "_SMALL_BYTES", 0)  # else XLA computes small projections
    x = normal(3, sequence, K, dtype=jnp.bfloat16)
    weights = [normal(K, heads * SIZE, dtype=jnp.bfloat16) / 16 for _ in range(3)]
    last = [each for each in fuse(layer).report(x, *weights) if "sequence last" in each.reason]
    assert len(last) == 3
    assert worst(layer, fuse(layer), [x, *weights]) <= 1

    def loss(*args):
        return jnp.sin(layer(*args).astype(jnp.float32)).mean()

    step = jax.grad(loss, argnums=(0, 1, 2, 3))
    assert worst(step, fuse(step), [x, *weights]) <= 1


@pytest.mark.parametrize("heads", [2, 8])
@pytest.mark.parametrize("entries", [1024, 1000])
def test_a_step_with_a_cache(normal, entries, heads):
    """Beside ``jit``: grouped queries read caches that the step updates in place."""
    keys, values = (normal(4, entries, heads, 128, dtype=jnp.bfloat16) for _ in range(2))
    q, new = normal(4, 1, 16, 128, dtype=jnp.bfloat16), normal(4, 1, heads, 128, dtype=jnp.bfloat16)

    def step(keys, values, q, new):
        at = (0, entries - 9, 0, 0)
        keys, values = (jax.lax.dynamic_update_slice(x, new, at) for x in (keys, values))
        length = jnp.full((4,), entries - 8, jnp.int32)
        y = jax.nn.dot_product_attention(q, keys, values, key_value_seq_lengths=length)
        wide = [jnp.repeat(x, 16 // heads, axis=2) for x in (keys, values)]
        scores = jnp.einsum(
            "bqhd,bkhd->bhqk", q.astype(jnp.float32) / 9, wide[0].astype(jnp.float32)
        )
        z = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(jnp.bfloat16), wide[1])
        return y, z, scores, keys, values

    args = keys, values, q, new
    text = jax.jit(fuse(step)).lower(*args).as_text()
    # XLA computes the scores of two rows for each head, which the step repeats twice.
    assert text.count("custom_call @jax_tcgemm_gemm") == (3 if heads == 8 else 2)
    assert worst(step, fuse(step), list(args)) <= 1
