"""User functions as epilogues within ``shard_map``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from sharded_checks import is_divided, put
from sharded_program import mesh_of

from jax_tcgemm import gated_gemm, gemm

pytestmark = [pytest.mark.any_jax, pytest.mark.usefixtures("divided_everywhere")]


def test_two_products_divided_by_hand_and_by_xla(normal):
    """``shard_map`` covers one axis; XLA partitions the other axes."""
    mesh = mesh_of()

    def program(x, gate, up):
        def part(x, gate, up):
            return gated_gemm(x, gate, up, epilogue=lambda g, u: jax.nn.silu(g) * jnp.sin(u))

        specs = {"in_specs": (P("x"), P(), P()), "out_specs": P("x")}
        return jax.shard_map(part, mesh=mesh, axis_names={"x"}, **specs)(x, gate, up)

    x = put(mesh, normal(64, 32), "x")
    gate, up = (put(mesh, normal(32, 48), None, "y") for _ in range(2))
    assert is_divided(program, x, gate, up)
    expected = jax.nn.silu(x @ gate) * jnp.sin(x @ up)
    np.testing.assert_allclose(jax.jit(program)(x, gate, up), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_function_closes_over_what_varies(normal, check_vma):
    """The array varies over mesh axes within ``shard_map``; tracing still works for any mesh."""
    mesh = mesh_of()
    keys = jax.random.split(jax.random.key(5), 4)

    def formula(product, scale, key):
        kept = jax.random.bernoulli(key, 0.5, product.shape)
        branch = jax.lax.cond(scale[0, 0] > 0, jnp.sin, jnp.cos, product * scale)
        return jnp.where(kept, jax.nn.relu(product) + branch, scale)

    def program(x, w, scale, keys):
        def part(x, w, scale, keys):
            return gemm(x, w, epilogue=lambda product: formula(product, scale, keys[0]))

        specs = {"in_specs": (P("x"), P(), P("x"), P("x")), "out_specs": P("x")}
        return jax.shard_map(part, mesh=mesh, check_vma=check_vma, **specs)(x, w, scale, keys)

    def plain(x, w, scale, keys):
        parts = zip(jnp.split(x, 4), jnp.split(scale, 4), range(4), strict=True)
        return jnp.concatenate([formula(x @ w, scale, keys[i]) for x, scale, i in parts])

    x, w, scale = normal(64, 32), normal(32, 48), normal(64, 1)
    np.testing.assert_allclose(
        jax.jit(program)(x, w, scale, keys), plain(x, w, scale, keys), rtol=1e-4, atol=1e-4
    )

    def gradients(f):
        loss = lambda *args: jnp.sum(jnp.square(f(*args, keys)))  # noqa: E731
        return jax.jit(jax.grad(loss, (0, 1, 2)))(x, w, scale)

    for got, expected in zip(gradients(program), gradients(plain), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3)
