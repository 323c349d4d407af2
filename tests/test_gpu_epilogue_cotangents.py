"""The cotangents of user epilogues, computed in one pass, on a Hopper GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_epilogues
from gpu_accuracy import in_float64

from jax_tcgemm import gated_gemm, gated_mlp, gemm, mlp, quantize, ragged_dot

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.usefixtures("never_apart")]

BF16 = jnp.bfloat16


def _dropout(acc, bias, residual):
    kept = jax.random.bernoulli(jax.random.key(0), 0.75, acc.shape)
    return jnp.where(kept, jax.nn.gelu(acc + bias) / 0.75, 0) + residual


_FUNCTIONS = {
    "softcap": (lambda acc, bias: 3 * jnp.tanh(acc / 3) + bias, ("n",)),
    "silu slope": (lambda acc, slope: acc * jax.nn.sigmoid(slope * acc), ("",)),
    "dropout": (_dropout, ("n", "mn")),
    "mish": (lambda acc, bias: jax.nn.mish(acc + bias), ("n",)),
    "row scale": (lambda acc, scale: jnp.square(jax.nn.relu(acc)) * scale, ("m1",)),
    "outer": (lambda acc, row, column: acc * row + column * jnp.exp(row), ("m1", "n")),
    "matrices": (lambda acc, x, y: jax.nn.silu(acc) * x + jnp.sin(y), ("mn", "mn")),
    "max": (lambda acc, bias, x: jnp.maximum(acc + bias, x), ("n", "mn")),
}


def _vjp(f, operands, cotangents):
    results, pullback = jax.vjp(f, *operands)
    return pullback(jax.tree.map(lambda y, ct: ct.astype(y.dtype), results, cotangents))


def _check(f, drawn, cotangent, assert_accurate, k, out_dtype=BF16):
    """Compares cotangents of z and of the operands with XLA's and with float64."""
    n = drawn[0].shape[-1]

    def ours(z, *others):
        a = jnp.pad(z, [(0, 0)] * (z.ndim - 1) + [(0, k - n)])
        eye = jnp.broadcast_to(jnp.eye(n, k, dtype=z.dtype), (*z.shape[:-2], n, k))
        return gemm(
            a,
            eye,
            transpose_b=True,
            epilogue=lambda *x: f(*x).astype(out_dtype),
            epilogue_operands=others,
        )

    def theirs(z, *others):
        return f(z.astype(jnp.float32), *others).astype(out_dtype)

    found = jax.jit(lambda *x: _vjp(ours, x, cotangent))(*drawn)
    baseline = jax.jit(lambda *x: _vjp(theirs, x, cotangent))(*drawn)
    exact = in_float64(lambda *x: _vjp(f, x[:-1], x[-1]), *drawn, cotangent)
    for x, y, true in zip(found, baseline, exact, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        # The kernel's own functions may have this extra error in float32 results.
        assert_accurate(x, y, true, slack=1e-6 * np.abs(true).max())


@pytest.mark.parametrize("name", _FUNCTIONS)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((128, 256), BF16),
        ((200, 136), jnp.float16),
        ((65, 1064), BF16),
        ((333, 131), BF16),  # no whole vectors
        ((3, 70, 264), BF16),
    ],
)
def test_cotangents(name, shape, dtype, assert_accurate):
    f, kinds = _FUNCTIONS[name]
    if name == "dropout" and len(shape) > 2:
        pytest.skip("an index along a batch of weights is not translated")
    rng = np.random.default_rng(len(name))
    n = shape[-1]
    shapes = {"": (), "n": (n,), "m1": (*shape[:-1], 1), "mn": shape}

    def draw(shape, dtype):
        return jnp.asarray(rng.normal(size=shape).astype(np.float32)).astype(dtype)

    operands = [draw(shapes[kind], (dtype, jnp.float32)[i % 2]) for i, kind in enumerate(kinds)]
    _check(
        f,
        [draw(shape, dtype), *operands],
        draw(shape, dtype),
        assert_accurate,
        k=-(-n // 64) * 64,
        out_dtype=dtype,
    )


@pytest.mark.parametrize("seed", range(24))
def test_random_functions(seed, assert_accurate):
    drawn = random_epilogues.draw_smooth(seed)
    m, n = 96, 72 + 8 * (seed % 3)
    rng = np.random.default_rng(seed)
    z, cotangent = (
        jnp.asarray(rng.normal(size=(m, n)).astype(np.float32)).astype(BF16) for _ in range(2)
    )
    others = [jnp.asarray(x) for x in random_epilogues.operands_of(drawn, m, n)]

    def f(acc, *x):
        return drawn.run(acc.dtype == jnp.float64, acc, *x)[0]

    _check(f, [z, *others], cotangent, assert_accurate, k=128)


def test_gated_and_ragged(assert_accurate):
    m, n, k, groups = 256, 264, 128, 3
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape).astype(np.float32)).astype(BF16)

    def gate(g, u, bias):
        return (jnp.clip(jax.nn.silu(g + bias), -2, 2) * u).astype(BF16)

    def by_xla(x, w, v, bias):
        g, u = (jnp.matmul(x, y, preferred_element_type=jnp.float32) for y in (w, v))
        return gate(g.astype(BF16).astype(jnp.float32), u.astype(BF16).astype(jnp.float32), bias)

    operands = draw(m, k), draw(k, n) / 8, draw(k, n) / 8, draw(n)
    cotangent = draw(m, n)
    ours = jax.jit(
        lambda *x: _vjp(
            lambda x, w, v, bias: gated_gemm(x, w, v, epilogue=gate, epilogue_operands=(bias,)),
            x,
            cotangent,
        )
    )(*operands)
    for x, y in zip(ours, _vjp(by_xla, operands, cotangent), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.linalg.norm(x - y) < 2**-6 * np.linalg.norm(y)

    sizes = jnp.asarray([100, 0, 156], jnp.int32)
    f = lambda acc, scale: (jnp.tanh(acc) * scale).astype(BF16)  # noqa: E731
    lhs, rhs, scale = draw(m, k), draw(groups, k, n) / 8, draw(m, 1)

    def grouped(lhs, rhs, scale):
        return ragged_dot(lhs, rhs, sizes, epilogue=f, epilogue_operands=(scale,))

    def grouped_by_xla(lhs, rhs, scale):
        z = jax.lax.ragged_dot(lhs, rhs, sizes, preferred_element_type=jnp.float32)
        return f(z.astype(BF16).astype(jnp.float32), scale)

    ours = jax.jit(lambda *x: _vjp(grouped, x, cotangent))(lhs, rhs, scale)
    for x, y in zip(ours, _vjp(grouped_by_xla, (lhs, rhs, scale), cotangent), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.linalg.norm(x - y) < 2**-6 * np.linalg.norm(y)


def _near(found, expected):
    for x, y in zip(found, expected, strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.linalg.norm(x - y) < 2**-6 * np.linalg.norm(y)


@pytest.mark.parametrize("is_gated", [False, True])
def test_two_layers_go_back_through_the_function_in_a_gemm(is_gated):
    m, k, f, n = 256, 128, 264, 192
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape).astype(np.float32)).astype(BF16)

    def gate(g, u, bias, scale):
        return (jax.nn.silu(g + bias) * u * scale).astype(BF16)

    def hidden(acc, bias, scale):
        return (_dropout(acc, bias, 0) * scale).astype(BF16)

    weights = [draw(k, f) / 8 for _ in range(1 + is_gated)]
    operands = [draw(m, k), *weights, draw(f, n) / 16, draw(f), draw(m, 1)]
    cotangent = draw(m, n)

    def ours(x, *rest):
        *w, w2, bias, scale = rest
        given = {"epilogue_operands": (bias, scale)}
        if is_gated:
            return gated_mlp(x, *w, w2, epilogue=gate, **given)
        return mlp(x, *w, None, w2, epilogue=hidden, **given)

    def by_xla(x, *rest):
        *w, w2, bias, scale = rest
        z = [jnp.matmul(x, y, preferred_element_type=jnp.float32) for y in w]
        z = [each.astype(BF16).astype(jnp.float32) for each in z]
        return (gate if is_gated else hidden)(*z, bias, scale) @ w2

    _near(
        jax.jit(lambda *x: _vjp(ours, x, cotangent))(*operands),
        jax.jit(lambda *x: _vjp(by_xla, x, cotangent))(*operands),
    )


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("tile", [(1, -1, -1), (1, 1, -1), (-1, 1, -1)])
def test_ragged_dot_of_quantized_experts(dtype, tile):
    m, n, k, groups = 300, 192, 256, 4
    rng = np.random.default_rng(0)
    x, w = (
        jnp.asarray(rng.normal(size=shape).astype(np.float32)) for shape in ((m, k), (groups, n, k))
    )
    sizes = jnp.asarray([100, 0, 170, 20], jnp.int32)
    bias = jnp.asarray(rng.normal(size=(groups, n)).astype(np.float32))
    quantized = quantize(x, dtype, tile=(1, -1)), quantize(w, dtype, tile=tile)
    options = {"transpose_rhs": True, "bias": bias, "activation": "gelu", "precision": "highest"}
    y = jax.jit(lambda x, w: ragged_dot(x, w, sizes, **options))(*quantized)
    wide = [np.asarray(each.dequantize(), np.float64) for each in quantized]
    group = np.repeat(np.arange(groups), np.asarray(sizes))
    z = np.einsum("mk,mnk->mn", wide[0][:290], wide[1][group]) + np.asarray(bias)[group]
    exact = 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
    assert y.dtype == jnp.float32
    assert np.max(np.abs(np.asarray(y)[:290] - exact)) < 2**-9 * np.max(np.abs(exact))
    assert not np.asarray(y)[290:].any()
