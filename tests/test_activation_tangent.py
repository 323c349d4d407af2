"""The tangent of a biased activation, its transpose, and when one pass computes both."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sharded_checks import put
from sharded_program import mesh_of

from jax_tcgemm import clip, gemm, softcap
from jax_tcgemm.primitives.epilogue_derivative import activation_tangent
from jax_tcgemm.problem.activations import ACTIVATIONS, resolve

pytestmark = pytest.mark.any_jax

TARGET = "jax_tcgemm_compiled_pass_v2"


def plain(activation, z, t, bias=None):
    t = t if bias is None else t + bias
    return jax.jvp(resolve(activation).reference, (z,), (t,))[1]


@pytest.fixture
def operands(normal):
    return normal(3, 4, 8), normal(3, 4, 8), normal(8)


def test_no_bias_is_not_one_of_float64(operands):
    """NumPy treats None and float64 as equal, so caches would confuse them."""
    with jax.enable_x64(True):
        z, t, bias = (jnp.asarray(np.asarray(x, np.float64)) for x in operands)
        jax.vjp(lambda *x: activation_tangent("silu", *x), z, t)[1](z)
        (sums,) = jax.vjp(lambda bias: activation_tangent("silu", z, t, bias), bias)[1](z)
        expected = jax.vjp(lambda bias: plain("silu", z, t, bias), bias)[1](z)[0]
        np.testing.assert_allclose(sums, expected, rtol=1e-12)


def test_transpose_of_the_transpose(operands):
    z, t, bias = operands

    def f(t, bias):
        return activation_tangent("gelu", z, t, bias)

    def back(g):
        return jax.linear_transpose(f, t, bias)(g)

    (again,) = jax.linear_transpose(back, t)((t, bias))
    np.testing.assert_allclose(again, f(t, bias), rtol=1e-6, atol=1e-6)


def test_vmap_over_nothing_of_it(normal):
    """Neither operand nor result is mapped, so vmap computes nothing for each element."""
    a, b, bias = normal(4, 6), normal(6, 8), normal(8)

    def gradients(a, b, bias):
        return jax.grad(lambda *x: gemm(*x[:2], bias=x[2], activation="gelu").sum(), (0, 1, 2))(
            a, b, bias
        )

    def scaled(rate):
        return jax.tree.map(lambda g: rate * g, gradients(a, b, bias))

    rates = jnp.arange(1.0, 4.0)
    for got, g in zip(jax.vmap(scaled)(rates), gradients(a, b, bias), strict=True):
        np.testing.assert_allclose(got, rates.reshape(-1, *[1] * g.ndim) * g, rtol=1e-6)
    text = jax.jit(jax.vmap(scaled)).lower(rates).as_text()
    assert "tensor<3x4x8xf32>" not in text


def test_explicitly_sharded_batch(normal):
    """A custom call cannot be partitioned; XLA's own operations can."""
    mesh = mesh_of((2,), jax.sharding.AxisType.Explicit)
    a, b, bias = normal(4, 3, 6), normal(6, 8), normal(8)

    def loss(f, a, b, bias):
        return jnp.sum(jnp.sin(f(a, b, bias)))

    def gradients(f):
        return jax.vmap(jax.grad(lambda *x: loss(f, *x), (0, 1, 2)), (0, None, None))

    def formula(a, b, bias):
        return jax.nn.gelu(a @ b + bias)

    def ours(a, b, bias):
        return gemm(a, b, bias=bias, activation="gelu")

    expected = gradients(formula)(a, b, bias)
    with jax.set_mesh(mesh):
        placed = put(mesh, a, "x"), put(mesh, b), put(mesh, bias)
        got = jax.jit(gradients(ours))(*placed)
    # In 400 draws, both differed from float64 by up to 4.4e-5.
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def layer_gradients(*wanted):
    def gradients(x, w, bias):
        def loss(x, w, bias):
            return jnp.square(gemm(x, w, bias=bias, activation="gelu")).astype(jnp.float32).sum()

        return jax.grad(loss, wanted)(x, w, bias)

    return gradients


def layer(normal, rows, n, dtype=jnp.bfloat16, bias_dtype=None):
    x, w = normal(rows, 16, dtype=dtype), normal(16, n, dtype=dtype)
    return x, w, normal(n, dtype=bias_dtype or dtype)


def passes(text):
    """Returns the source and the types of the results of each pass."""
    found = re.findall(rf'custom_call @{TARGET}.*?source = "(.*?)".*-> (.*)', text)
    return [(source, re.findall(r"tensor<([\w<>]+)>", results)) for source, results in found]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("bias_dtype", [None, jnp.float32])
def test_large_layer_has_one_pass_for_both(normal, cuda_module, dtype, bias_dtype):
    """Three products run beside this pass. XLA adds up the sums of 64 rows each."""
    args = layer(normal, 4096, 1024, dtype, bias_dtype)
    text, calls = cuda_module(layer_gradients(0, 1, 2), *args)
    assert len(calls) == 3
    ((source, results),) = passes(text)
    assert results == [f"4096x1024x{'bf16' if dtype == jnp.bfloat16 else 'f16'}", "64x1024xf32"]
    assert source.count("BesideTanh") == 1
    assert "stablehlo.tanh" not in text


def test_without_a_bias_there_are_no_sums(normal, cuda_module):
    text, _ = cuda_module(layer_gradients(0, 1), *layer(normal, 4096, 1024))
    assert [results for _, results in passes(text)] == [["4096x1024xbf16"]]


@pytest.mark.parametrize(
    ("rows", "n", "dtype", "products"),
    [
        (4095, 1024, jnp.bfloat16, 3),
        (4096, 1028, jnp.bfloat16, 2),  # w's gradient runs on XLA: unaligned, few rows
        (4096, 1024, jnp.float32, 3),
    ],
    ids=["small", "unaligned rows", "float32"],
)
def test_what_is_left_to_xla(normal, cuda_module, rows, n, dtype, products):
    text, calls = cuda_module(layer_gradients(0, 1, 2), *layer(normal, rows, n, dtype))
    assert TARGET not in text
    assert len(calls) == products


@pytest.mark.parametrize("activation", [*ACTIVATIONS, softcap(30.0), clip(0.0, 6.0)], ids=str)
def test_a_pass_of_every_activation(cuda_module, activation):
    z = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16)

    def f(z, g):
        return jax.linear_transpose(lambda t: activation_tangent(activation, z, t), g)(g)[0]

    text, _ = cuda_module(f, z, z)
    assert len(passes(text)) == 1


def test_symbolic_shapes_are_left_to_xla(all_kernels):
    (m,) = jax.export.symbolic_shape("m", constraints=["m >= 8192"])
    args = [jax.ShapeDtypeStruct((m, 1024), jnp.bfloat16)] * 2

    def f(z, g):
        return jax.linear_transpose(lambda t: activation_tangent("silu", z, t), g)(g)[0]

    exported = jax.export.export(jax.jit(f), platforms=("cuda",))(*args)
    assert TARGET not in exported.mlir_module()


def test_sums_are_not_of_rounded_products():
    """4096 products are 3 + 3/128 each; bfloat16 would round each to 3 + 4/128."""
    rows = 4096
    z = jnp.full((rows, 8), 1.5, jnp.bfloat16)  # relu_squared' = 3
    g = jnp.full((rows, 8), 1 + 2**-7, jnp.bfloat16)
    bias = jnp.zeros(8, jnp.float32)

    def f(t, bias):
        return activation_tangent("relu_squared", z, t, bias)

    of_t, of_bias = jax.linear_transpose(f, g, bias)(g)
    assert of_bias.dtype == jnp.float32
    np.testing.assert_array_equal(of_bias, rows * (3 + 3 / 128))
    assert of_t.dtype == jnp.bfloat16
    np.testing.assert_array_equal(of_t.astype(jnp.float32), 3 + 4 / 128)
