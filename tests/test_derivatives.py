"""Derivatives of `gemm`: batches and layouts, types, and work that is skipped."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_call import assert_trees_close, formula, fused, square_sum

from jax_tcgemm import gemm

pytestmark = pytest.mark.any_jax


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize(
    ("a_batch", "b_batch", "bias_batch"),
    [
        ((), (), ()),
        ((3,), (), ()),
        ((), (3,), (3,)),
        ((2, 3), (3,), (2, 1)),
        ((2, 3), (2, 1), (3,)),
        ((2, 1), (1, 3), (2, 3)),
        ((2, 3), (), (2, 1)),
    ],
)
def test_grad_of_every_operand(normal, transpose_a, transpose_b, a_batch, b_batch, bias_batch):
    a, b = normal(*a_batch, 4, 6), normal(*b_batch, 6, 5)
    args = (a, b, normal(1, 5), normal(*bias_batch, 5), jnp.float32(0.7), jnp.float32(-0.4))

    def stored(a, b, c, bias, alpha, beta):
        return gemm(
            a.mT if transpose_a else a,
            b.mT if transpose_b else b,
            c,
            bias=bias,
            alpha=alpha,
            beta=beta,
            activation="silu",
            transpose_a=transpose_a,
            transpose_b=transpose_b,
        )

    expected = jax.grad(square_sum(functools.partial(formula, activation="silu")), range(6))(*args)
    actual = jax.grad(square_sum(stored), range(6))(*args)
    assert_trees_close(actual, expected)


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_linear_transpose_in_a_residual(normal, activation):
    a, b, residual, g = normal(2, 5, 7), normal(7, 3), normal(5, 1), normal(2, 5, 3)

    def f(residual):
        return gemm(a, b, bias=b[0], activation=activation, residual=residual)

    (cotangent,) = jax.linear_transpose(f, residual)(g)
    np.testing.assert_allclose(cotangent, g.sum((0, 2))[:, None], rtol=1e-5, atol=1e-5)
    # Only the pre-activation, one of the primitive's two results, has a cotangent.
    (cotangent,) = jax.linear_transpose(lambda r: jax.jvp(f, (r,), (r,))[1], residual)(g)
    np.testing.assert_allclose(cotangent, g.sum((0, 2))[:, None], rtol=1e-5, atol=1e-5)


def test_linear_transpose(normal):
    a, b, g = normal(4, 6), normal(6, 5), normal(4, 5)
    (cotangent,) = jax.linear_transpose(lambda a: gemm(a, b), a)(g)
    np.testing.assert_allclose(cotangent, g @ b.T, rtol=1e-5, atol=1e-5)
    # The call is linear in several operands at once: alpha and beta, a and c.
    c = normal(4, 5)
    f = jax.linear_transpose(lambda s, t: gemm(a, b, c, alpha=s, beta=t), 1.0, 1.0)
    expected = (jnp.sum(g * (a @ b)), jnp.sum(g * c))
    assert_trees_close(f(g), expected)
    f = jax.linear_transpose(lambda a, c: gemm(a, b, c, alpha=2.0, beta=3.0), a, c)
    assert_trees_close(f(g), (2 * g @ b.T, 3 * g))


@pytest.mark.parametrize("preferred", [None, jnp.float32])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bit_gradients(normal, exact, assert_accurate, dtype, preferred):
    a, b, bias = normal(2, 16, 24, dtype=dtype), normal(24, 8, dtype=dtype), normal(8, dtype=dtype)
    g = normal(2, 16, 8, dtype=preferred or dtype)

    def f(a, b, bias):
        return gemm(a, b, bias=bias, preferred_element_type=preferred)

    def by_matmul(a, b, bias):
        z = jnp.matmul(a, b, preferred_element_type=jnp.float32) + bias.astype(jnp.float32)
        return z.astype(preferred or dtype)

    actual = jax.vjp(f, a, b, bias)[1](g)
    baseline = jax.vjp(by_matmul, a, b, bias)[1](g)
    exact_grads = (
        exact(g) @ exact(b).T,
        np.einsum("imk,imn->kn", exact(a), exact(g)),
        exact(g).sum((0, 1)),
    )
    for x, operand, y, z in zip(actual, (a, b, bias), baseline, exact_grads, strict=True):
        assert x.dtype == operand.dtype
        assert_accurate(x, y, z)


def test_preset_gradients_are_not_rounded_to_the_algorithm_type(normal, exact):
    a, b = normal(16, 24), normal(24, 8)
    grad = jax.grad(lambda a: gemm(a, b, precision="BF16_BF16_F32").sum())(a)
    expected = np.broadcast_to(exact(b.astype(jnp.bfloat16)).sum(1), (16, 24))
    assert grad.dtype == jnp.float32
    np.testing.assert_allclose(grad, expected, rtol=1e-6, atol=1e-6)


def test_integer_operand_has_no_gradient(normal):
    a, b, bias = normal(3, 4, dtype=jnp.int8), normal(4, 5), normal(5)
    expected = jax.grad(lambda b: jnp.sum(jnp.sin(a.astype(jnp.float32) @ b + bias)))(b)
    actual = jax.grad(lambda b: jnp.sum(jnp.sin(gemm(a, b, bias=bias))))(b)
    assert_trees_close(actual, expected)


# Work that is skipped


def test_zero_tangents_cost_nothing(operands, count_gemms):
    a, b, c, bias, _, _ = operands

    def f(c, bias):
        return fused(a, b, c, bias, 1.5, 0.5)

    tangents = (jnp.ones_like(c), jnp.ones_like(bias))
    assert count_gemms(lambda *primals: jax.jvp(f, primals, tangents), c, bias) == 1
    assert count_gemms(jax.grad(square_sum(lambda bias: f(c, bias))), bias) == 1


def test_gradients_of_unused_operands_are_not_computed(operands, count_gemms):
    loss = square_sum(fused)
    assert count_gemms(loss, *operands) == 1
    assert count_gemms(jax.grad(loss, argnums=1), *operands) == 2
    assert count_gemms(jax.grad(loss, argnums=(0, 1)), *operands) == 3

    def unused(*args):
        _, grad_b = jax.grad(loss, argnums=(0, 1))(*args)
        return grad_b

    assert count_gemms(unused, *operands) == 2


def test_linear_gradient_runs_no_forward_product(normal, count_gemms):
    a, b = normal(4, 6), normal(6, 5)
    assert count_gemms(jax.grad(lambda a, b: gemm(a, b).sum()), a, b) == 1


def test_unread_preactivation_is_dropped(normal, cuda_module):
    a, b = normal(8, 8), normal(8, 8)

    def only_primal(a, b):
        return jax.vjp(lambda a: gemm(a, b, activation="gelu"), a)[0]

    _, (call,) = cuda_module(only_primal, a, b)
    assert (call["has_aux"], call["activation"]) == (False, "Gelu")

    def only_tangent(a, b):
        return jax.grad(lambda a: gemm(a, b, activation="gelu").sum())(a)

    _, (forward, _) = cuda_module(only_tangent, a, b)
    assert (forward["has_aux"], forward["activation"]) == (False, "")


def test_reverse_pass_forms_the_inner_cotangent_once(normal, cuda_module):
    """One elementwise expression computes it; two products and the bias sum read it."""
    args = [normal(*shape, dtype=jnp.bfloat16) for shape in ((16, 24), (24, 8), (8,))]

    def f(a, b, bias):
        return gemm(a, b, bias=bias, activation="gelu")

    text, calls = cuda_module(lambda g, *args: jax.vjp(f, *args)[1](g), f(*args), *args)
    assert len(calls) == 3
    assert text.count("stablehlo.tanh") == 1
    assert len(re.findall(r"stablehlo.reduce\(.*\(tensor<16x8xf32>", text)) == 1


@pytest.mark.parametrize(
    ("m", "dtype", "products"), [(4096, None, 4), (8, None, 3), (4096, "float32", 3)]
)
def test_large_bias_gradients_are_products_with_ones(normal, cuda_module, m, dtype, products):
    """Row sums are a fourth product if rows are many and the result has 16 bits."""
    x, w = normal(2, m // 2, 16, dtype=jnp.bfloat16), normal(16, 1024, dtype=jnp.bfloat16)
    bias = normal(1024, dtype=dtype or jnp.bfloat16)

    def loss(x, w, bias):
        return jnp.square(gemm(x, w, bias=bias)).astype(jnp.float32).sum()

    gradients = jax.grad(loss, (0, 1, 2))
    assert len(cuda_module(gradients, x, w, bias)[1]) == products
    z = (x.astype(jnp.float32) @ w.astype(jnp.float32)) + bias.astype(jnp.float32)
    expected = 2 * z.sum((0, 1))
    got = jax.jit(gradients)(x, w, bias)[2]
    assert got.dtype == bias.dtype
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-2 * np.abs(expected).max())


def test_reverse_pass_keeps_one_residual_of_the_result_type(normal):
    a, b = normal(16, 24, dtype=jnp.bfloat16), normal(24, 8, dtype=jnp.bfloat16)
    _, pullback = jax.vjp(lambda a, b: gemm(a, b, activation="gelu"), a, b)
    saved = [x for x in jax.tree.leaves(pullback) if x.shape == (16, 8)]
    assert [x.dtype for x in saved] == [jnp.bfloat16]
