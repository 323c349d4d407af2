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
