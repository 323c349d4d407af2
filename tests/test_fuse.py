"""``fuse``: how it rewrites a function's products, and that results are right."""

from __future__ import annotations

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_calls import bf16
from fusions import (
    K,
    M,
    N,
    check,
    check_equal,
    gated_loss,
    layer,
    layer_arrays,
    mlp_loss,
    operations,
    with_epilogues,
)

from jax_tcgemm import fuse

# The attribute ``jax_tcgemm.transforms.fuse`` is the function.
rewriting = importlib.import_module("jax_tcgemm.transforms.rewriting")
neighbours = importlib.import_module("jax_tcgemm.transforms.neighbours")


@pytest.fixture
def arrays(normal):
    return layer_arrays(normal)


def test_a_layer_is_one_kernel(arrays):
    x, w, b = (arrays[name] for name in "xwb")
    assert operations(fuse(layer), x, w, b) == {"tcgemm_compiled": 1}
    assert with_epilogues(layer, x, w, b) == [(3, 1)]
    check(layer, x, w, b)


def test_step_of_an_mlp(arrays):
    step = jax.value_and_grad(mlp_loss, argnums=(0, 1, 2, 3))
    args = [arrays[name] for name in "xwbd"]
    # Four kernels have an epilogue: the hidden layer and its preactivation; the residual; the
    # cotangent of the preactivation with the bias sums; the sum of two cotangents. Two plain
    # kernels compute weight gradients.
    assert with_epilogues(step, *args) == [(3, 2), (4, 2), (3, 2), (3, 1)]
    found = operations(fuse(step), *args)
    assert found["tcgemm_compiled"] == 4
    assert found["tcgemm"] == 2
    # The square of the loss is the only matrix operation left.
    assert not found["transpose"]
    assert not found["dot_general"]
    assert found["reduce_sum"] == 2
    check(step, *args)


def test_step_of_a_gated_mlp(arrays, monkeypatch):
    monkeypatch.setattr(neighbours, "_SMALL_BYTES", 0)
    step = jax.value_and_grad(gated_loss, argnums=(0, 1, 2, 3))
    args = [arrays[name] for name in "xwud"]
    found = operations(fuse(step), *args)
    # The plain kernels compute three weight gradients and one of the two products for x's gradient.
    assert (found["tcgemm_compiled"], found["tcgemm"]) == (4, 4), found
    # The first call has two weights. It returns the hidden layer and both products, which the
    # derivative reads.
    assert with_epilogues(step, *args)[0] == (3, 3)
    check(step, *args)


def test_residual_is_read_by_the_kernel(arrays):
    def f(x, w, d):
        return x + (x @ w) @ d

    x, w, d = (arrays[name] for name in "xwd")
    assert with_epilogues(f, x, w, d) == [(3, 1)]
    check(f, x, w, d)


def test_normalised_residual_is_written_once(arrays):
    """The kernel writes one matrix instead of two that two XLA kernels would read."""

    def f(x, w, d):
        y = x + (x @ w) @ d
        wide = y.astype(jnp.float32)
        wide = wide - wide.mean(-1, keepdims=True)
        return y + jnp.sin(wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True))).astype(y.dtype)

    args = [arrays[name] for name in "xwd"]
    assert with_epilogues(f, *args) == [(3, 1)]
    check(f, *args)


def test_softmax_starts_from_the_product(arrays):
    """XLA scales logits where it reads them; float32 logits would be twice as large."""

    def f(x, w):
        return jax.nn.softmax((x @ w).astype(jnp.float32) * 0.125).astype(jnp.bfloat16)

    x, w = arrays["x"], arrays["w"]
    assert not with_epilogues(f, x, w)
    assert operations(fuse(f), x, w)["tcgemm"] == 1
    check(f, x, w)


def test_float32_results(arrays):
    def f(x, w):
        return (x @ w).astype(jnp.float32)

    x, w = arrays["x"], arrays["w"]
    assert operations(fuse(f), x, w) == {"tcgemm": 1}
    with jax.enable_x64(True):
        exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    np.testing.assert_allclose(fuse(f)(x, w), exact, atol=1e-5)


def test_gradient_of_a_weight_is_not_transposed(arrays):
    x, w = arrays["x"], arrays["w"]
    step = jax.grad(lambda w: (x @ w).astype(jnp.float32).sum())
    assert operations(step, w)["transpose"] == 1
    assert not operations(fuse(step), w)["transpose"]
    check(step, w)


def test_dropout_is_drawn_by_the_kernel(arrays):
    x, w = arrays["x"], arrays["w"]
    key = jax.random.key(3)

    def f(x, w, shape=(M, N)):
        kept = jax.random.bernoulli(key, 0.9, shape)
        return jnp.where(kept, x @ w / 0.9, 0).astype(x.dtype)

    wide = jax.ShapeDtypeStruct((8192, K), x.dtype), jax.ShapeDtypeStruct((K, 8192), x.dtype)
    assert operations(fuse(functools.partial(f, shape=(8192, 8192))), *wide)["random_bits"] == 0
    # XLA draws few numbers in less time.
    assert operations(fuse(f), x, w)["random_bits"] == 1
    check(f, x, w)


def test_mask_that_others_read_is_drawn_once(arrays):
    x, w = arrays["x"], arrays["w"]

    def f(x, w):
        kept = jax.random.bernoulli(jax.random.key(3), 0.9, (M, N))
        return jnp.where(kept, x @ w / 0.9, 0).astype(x.dtype), kept

    assert operations(fuse(f), x, w)["random_bits"] == 1
    check(f, x, w)


def test_what_depends_on_a_region_stays_out_of_it(arrays):
    """An intermediate value leaves the region and comes back as a row's maximum."""
    x, w = arrays["x"], arrays["w"]

    def f(x, w):
        z = jnp.tanh(x @ w)
        return (z / z.max(-1, keepdims=True) + z).astype(jnp.bfloat16), z

    check(f, x, w)


def test_two_products_that_read_each_other(arrays):
    """Each region could take the other's product, but not both at once."""
    x, w, u = (arrays[name] for name in "xwu")

    def f(x, w, u):
        p, q = jnp.sin(x @ w), jnp.cos(x[::-1] @ u)
        return jnp.exp(-(p * q)), p + q

    check(f, x, w, u)


@pytest.mark.parametrize("activation", [jax.nn.relu, jax.nn.softplus, jax.nn.leaky_relu])
def test_custom_derivatives_stay(arrays, activation):
    """``grad`` of ``fuse``: at a tie, ``relu`` has its own derivative."""
    x, w, b = (arrays[name] for name in "xwb")

    def f(x, w, b):
        return activation(x @ w + b).astype(jnp.float32).sum()

    assert with_epilogues(lambda *a: activation(a[0] @ a[1] + a[2]), x, w, b) == [(3, 1)]
    at_a_tie = jax.grad(fuse(f), argnums=2)(jnp.zeros_like(x), w, jnp.zeros_like(b))
    expected = jax.grad(f, argnums=2)(jnp.zeros_like(x), w, jnp.zeros_like(b))
    np.testing.assert_array_equal(at_a_tie, expected)


def test_grad_jvp_and_vmap_of_fused(arrays):
    x, w, b = (arrays[name] for name in "xwb")

    def f(x, w, b):
        return layer(x, w, b).astype(jnp.float32)

    def derived(g):
        tangent = jax.jvp(lambda x: g(x, w, b), (x,), (x,))[1]
        gradient = jax.grad(lambda w: (g(x, w, b) * g(x, w, b)).sum())(w)
        return tangent, gradient, jax.vmap(g, (None, 0, None))(x, jnp.stack([w, w]), b)

    check_equal(derived(fuse(f)), derived(f))


# Other contents of a call


def test_other_arguments(arrays):
    x, w = arrays["x"], arrays["w"]

    def f(arrays, scale=2.0, *, activation=None, flag=False):
        y = arrays["x"] @ arrays["w"] * scale
        return {"y": activation(y) if flag else y, "none": None}

    got = fuse(f)({"x": x, "w": w}, 0.5, activation=jnp.tanh, flag=True)
    expected = f({"x": x, "w": w}, 0.5, activation=jnp.tanh, flag=True)
    assert got["none"] is None
    np.testing.assert_allclose(
        *(np.asarray(z["y"], np.float32) for z in (got, expected)), atol=0.01
    )
    assert fuse(f).__name__ == "f"


def test_float32_models_take_the_products(normal):
    x, w = normal(M, K), normal(K, N)

    def f(x, w):
        return jax.nn.relu(x @ w + 1)

    found = operations(fuse(f), x, w)
    assert found["tcgemm"] == 1
    assert not found["tcgemm_compiled"]
    with jax.default_matmul_precision("highest"):
        check(f, x, w, slack=4, between=jnp.float32)


def test_few_rows_have_an_epilogue_but_not_in_batches(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(rewriting, "log", said.append)
    monkeypatch.setattr(neighbours, "_SMALL_BYTES", 0)
    f = jax.jit(lambda x, w: jnp.tanh(x @ w))
    assert operations(fuse(f), bf16(16, K), bf16(K, N)) == {"tcgemm_compiled": 1}
    of_columns = jax.jit(lambda x, w: jnp.tanh(jnp.einsum("abk,kn->abn", x, w)))
    x = jnp.zeros((2, K, 2), jnp.bfloat16).swapaxes(1, 2)
    assert operations(fuse(of_columns), x, bf16(K, N)) == {"tcgemm_compiled": 1}


@pytest.mark.parametrize("count", [8, 15])
def test_more_operands_than_a_kernel_reads(arrays, count):
    x, w = arrays["x"], arrays["w"]

    def f(x, w, *others):
        y = x @ w
        for i, other in enumerate(others):
            y = jnp.sin(y) * other + i
        return y

    others = [bf16_of(arrays["w"], i) for i in range(count)]
    # A kernel cannot read this many matrices at once. XLA would read them for the rest, so nothing
    # is saved.
    assert with_epilogues(f, x, w, *others) == ([(10, 1)] if count == 8 else [])
    check(f, x, w, *others)


def bf16_of(like, seed):
    return jax.random.normal(jax.random.key(seed), (M, like.shape[1])).astype(like.dtype)


def test_products_over_groups(normal):
    x, w = (normal(*s, dtype=jnp.bfloat16) / 8 for s in ((M, K), (3, K, N)))
    sizes = jnp.array([100, 120, 100])

    def loss(x, w):
        return jax.nn.silu(jax.lax.ragged_dot(x, w, sizes)).astype(jnp.float32).sum()

    found = operations(fuse(jax.value_and_grad(loss, argnums=(0, 1))), x, w)
    assert found["tcgemm_compiled_ragged"] == 1
    assert found["tcgemm_ragged_dot"] + found["tcgemm_ragged_contraction"] == 2, found
    assert not found["ragged_dot_general"]
    got = jax.value_and_grad(fuse(loss), argnums=(0, 1))(x, w)
    step = fuse(jax.value_and_grad(loss, argnums=(0, 1)))(x, w)
    expected = jax.value_and_grad(loss, argnums=(0, 1))(x, w)
    for one in (got, step):
        for a, b in zip(*map(jax.tree.leaves, (one, expected)), strict=True):
            a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
            np.testing.assert_allclose(a, b, atol=0.02 * np.abs(b).max())


@pytest.mark.parametrize(
    ("numbers", "shapes", "is_fused"),
    [
        ((((2,), (0,)), ((), ())), ((4, 40, K), (K, N)), True),  # tokens of a batch
        ((((0, 1), (0, 1)), ((), ())), ((4, 40, K), (4, 40, N)), True),  # weight gradient
        ((((2, 3), (0, 1)), ((), ())), ((4, 40, 6, 16), (6, 16, N)), True),  # merged heads
        ((((2,), (2,)), ((0,), (0,))), ((3, 80, K), (3, N, K)), None),  # a batch
        ((((2,), (0,)), ((), ())), ((4, 40, K), (K, 8, 16)), False),  # split heads
        ((((3,), (3,)), ((0, 2), (0, 2))), ((2, 80, 3, K), (2, 80, 3, K)), None),  # attention
    ],
)
def test_layouts(normal, numbers, shapes, is_fused):
    operands = [normal(*shape, dtype=jnp.bfloat16) / 8 for shape in shapes]

    def f(a, b):
        return jnp.tanh(jax.lax.dot_general(a, b, numbers))

    assert bool(with_epilogues(f, *operands)) == bool(is_fused)
    is_left = is_fused is None  # XLA computes it
    assert operations(fuse(f), *operands)["dot_general"] == is_left
    check(f, *operands)
