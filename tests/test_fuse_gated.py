"""Few rows of gated layers under ``fuse``: one kernel reads both weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from fusions import check, operations, with_epilogues

from jax_tcgemm import fuse


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_few_rows_of_a_gated_layer_are_one_kernel(normal, rows, wide):
    """A kernel reads both weights; XLA computes the products of few rows that do not meet."""
    x = normal(rows, 1024, dtype=jnp.bfloat16)
    v, w = (normal(1024, 2048, dtype=jnp.bfloat16) / 32 for _ in range(2))

    def gated(x, v, w):
        gate, up = x @ v, x @ w
        if wide:
            gate, up = (y.astype(jnp.float32) for y in (gate, up))
        return (jax.nn.silu(gate) * up).astype(x.dtype)

    assert len(with_epilogues(gated, x, v, w)) == 1
    check(gated, x, v, w)


@pytest.mark.parametrize(
    ("joined", "n", "products"),
    [
        (lambda a, b, c: (jax.nn.silu(a), b), 2048, 2),
        (lambda a, b, c: jax.nn.silu(a) * b, 2052, 2),  # rows of the weights are unaligned
        (lambda a, b, c: jax.nn.sigmoid(a) * jnp.tanh(b) + jax.nn.sigmoid(c), 2048, 3),
    ],
)
def test_xla_computes_few_rows_of_products_that_no_kernel_joins(normal, joined, n, products):
    x = normal(16, 1024, dtype=jnp.bfloat16)
    weights = [normal(1024, n, dtype=jnp.bfloat16) / 32 for _ in range(3)]

    def f(x, *weights):
        return joined(*(x @ w for w in weights))

    found = operations(fuse(f), x, *weights)
    # A kernel may join two of the three products.
    assert found["tcgemm"] == 0
    assert found["dot_general"] + 2 * len(with_epilogues(f, x, *weights)) == products


def test_transposes_of_a_gated_layer(normal):
    """The layer is linear in one of its weights."""
    x, of_result = normal(80, 96, dtype=jnp.bfloat16), normal(80, 128, dtype=jnp.bfloat16)
    v, w = (normal(96, 128, dtype=jnp.bfloat16) / 8 for _ in range(2))
    for f in (lambda w: jax.nn.silu(x @ v) * (x @ w), lambda v: jax.nn.silu(x @ w) * (x @ v)):
        assert len(with_epilogues(f, w)) == 1
        for fused in (fuse(f), jax.jit(fuse(f))):
            (own,), (plain,) = (jax.linear_transpose(g, w)(of_result) for g in (fused, f))
            own, plain = own.astype(jnp.float32), plain.astype(jnp.float32)
            assert jnp.linalg.norm(own - plain) < 0.01 * jnp.linalg.norm(plain)
