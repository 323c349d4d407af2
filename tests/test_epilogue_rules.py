"""Custom derivatives within epilogues, and symbolic shapes."""

from __future__ import annotations

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tcgemm
from jax_tcgemm import gemm

pytestmark = pytest.mark.any_jax


def test_custom_vjp_as_an_epilogue(normal):
    @jax.custom_vjp
    def clipped(x):
        return jnp.clip(x, -1, 1)

    clipped.defvjp(lambda x: (clipped(x), None), lambda _, ct: (ct,))  # straight through
    a, b = normal(8, 16, dtype=jnp.bfloat16), normal(16, 8, dtype=jnp.bfloat16)
    grad = jax.grad(lambda a: gemm(a, b, epilogue=clipped).sum())(a)
    expected = jnp.ones((8, 8)) @ b.T.astype(jnp.float32)
    np.testing.assert_allclose(
        np.asarray(grad, np.float32), np.asarray(expected), rtol=0.02, atol=0.02
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scaled_back(factor, x):
    return x


_scaled_back.defvjp(lambda factor, x: (x, None), lambda factor, _, ct: (ct * factor,))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _scaled_along(factor, x):
    return x


_scaled_along.defjvp(lambda factor, x, t: (x[0], t[0] * factor))


@pytest.mark.parametrize("rule", [_scaled_back, _scaled_along])
def test_rules_with_other_arguments_are_other_functions(rule, normal):
    x, w = normal(4, 8), normal(8, 8)
    slopes = [
        jax.grad(lambda x, n=n: gemm(x, w, epilogue=lambda z: rule(n, jnp.sin(z))).sum())(x)
        for n in (2.0, 3.0)
    ]
    np.testing.assert_allclose(slopes[1], slopes[0] * 1.5, rtol=1e-5, atol=1e-5)


def test_custom_vjp_under_vmap_and_in_part(normal):
    x, w, bias = normal(4, 8), normal(8, 8), normal(8)
    f = lambda z, b: _scaled_back(2.0, z + b)  # noqa: E731

    def ours(x, b):
        return gemm(x, w, epilogue=f, epilogue_operands=(b,))

    def theirs(x, b):
        return f(x @ w, b)

    for each in (
        lambda g: jax.vmap(jax.grad(lambda x: g(x, bias).sum()))(x[None]),
        lambda g: jax.jacrev(g)(x, bias),
        lambda g: jax.jacrev(g, 1)(x, bias),
        lambda g: jax.grad(lambda b: g(x, b).sum())(bias),
    ):
        np.testing.assert_allclose(each(ours), each(theirs), rtol=1e-5, atol=1e-5)


def test_symbolic_shapes_of_several_scopes():
    for _ in range(2):
        m, k = jax.export.symbolic_shape("m,64")
        types = (
            jax.ShapeDtypeStruct((m, k), jnp.float32),
            jax.ShapeDtypeStruct((64, 32), jnp.float32),
        )
        grad = jax.grad(lambda a, b: gemm(a, b, epilogue=jnp.sin).sum(), (0, 1))
        exported = jax.export.export(
            jax.jit(grad), disabled_checks=jax_tcgemm.export_disabled_checks()
        )(*types)
        assert exported.out_avals[1].shape == (64, 32)
