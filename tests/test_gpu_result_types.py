"""Types of results, sums over many rows, and gradients added in place, on a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_accuracy import FLOATS

from jax_tcgemm import gemm
from jax_tcgemm.problem.activations import resolve

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("out_dtype", FLOATS)
def test_results_of_any_type(compare, normal, dtype, out_dtype):
    args = normal(200, 136, dtype=dtype), normal(136, 72, dtype=dtype), normal(72)

    def ours(a, b, bias):
        options = {"preferred_element_type": out_dtype, "activation": "gelu"}
        return [gemm(a, b, bias=bias, alpha=0.125, **options)]

    def formula(matmul, a, b, bias):
        return [resolve("gelu").reference(0.125 * matmul(a, b) + bias)]

    algorithm = {2: None, 4: "TF32_TF32_F32"}[jnp.dtype(dtype).itemsize]
    compare(ours, formula, args, out_dtype, algorithm)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sums_over_many_rows(compare, normal, dtype):
    """A large bias gradient is a product with ones."""
    args = normal(8200, 24, dtype=dtype) / 8, normal(24, 520, dtype=dtype), normal(520, dtype=dtype)

    def ours(a, b, bias):
        def loss(bias):
            return gemm(a, b, bias=bias, activation="tanh").astype(jnp.float32).sum()

        return [jax.grad(loss)(bias)]

    def formula(matmul, a, b, bias):
        return [(1 - jnp.tanh(matmul(a, b) + bias) ** 2).sum(0)]

    # Each term is rounded before the sum.
    slack = 8200**0.5 * float(jnp.finfo(dtype).eps)
    compare(ours, formula, args, dtype, slack=slack)


@pytest.mark.parametrize("donated", [False, True])
def test_gradients_are_accumulated_in_place(normal, exact, donated):
    x, dy = normal(512, 136, dtype=jnp.bfloat16), normal(512, 72, dtype=jnp.bfloat16)
    total = normal(136, 72)
    expected = exact(total)

    def accumulate(total, x, dy):
        return gemm(x, dy, total, transpose_a=True, preferred_element_type=jnp.float32)

    step = jax.jit(accumulate, donate_argnums=0 if donated else ())
    for _ in range(3):
        before, previous = total, exact(total)
        total = step(total, x, dy)
        if not donated:
            np.testing.assert_array_equal(exact(before), previous)
        expected = expected + exact(x).T @ exact(dy)
    np.testing.assert_allclose(exact(total), expected, rtol=1e-5, atol=1e-3)

    def scanned(total, x, dy):
        return jax.lax.scan(lambda t, _: (accumulate(t, x, dy), None), total, length=4)[0]

    got = jax.jit(scanned)(jnp.zeros((136, 72)), x, dy)
    np.testing.assert_allclose(exact(got), 4 * exact(x).T @ exact(dy), rtol=1e-5, atol=1e-3)
