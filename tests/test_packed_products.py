"""Products with packed and unpacked weights in 4 and 8 bits, in every function that takes them."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_values import BF16, QTYPES, check, close, drawn, weight, wide

import jax_tcgemm
from jax_tcgemm import (
    dot_general,
    gated_gemm,
    gated_mlp,
    gated_ragged_dot,
    gemm,
    mlp,
    pack,
    quantize,
    ragged_dot,
)

FORMS = pytest.mark.parametrize("form", [pack, lambda q: q], ids=["packed", "unpacked"])


@pytest.mark.parametrize("shape", [(1, 128, 64, 32), (5, 130, 70, 65), (3, 192, 130, 192)], ids=str)
@pytest.mark.parametrize("qtype", QTYPES)
def test_gemm(rng, qtype, shape):
    m, k, n, group = shape
    has_zeros = qtype.endswith("int4") and bool(rng.integers(2))
    q = weight(rng, qtype, (k, n), group, has_zeros=has_zeros)
    dtype = (BF16, jnp.float16)[rng.integers(2)]
    x = drawn(rng, m, k, dtype=dtype)
    for w in (pack(q), q):
        y = gemm(x, w)
        assert y.dtype == dtype
        check(q, x, y)
    y = gemm(x, pack(q), preferred_element_type=jnp.float32)
    assert y.dtype == jnp.float32
    check(q, x, y)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_wide_operands(rng, dtype):
    q = weight(rng, "uint4", (66, 10), 33, has_zeros=True)
    with jax.enable_x64(dtype == jnp.float64):
        x = jnp.asarray(rng.normal(size=(3, 66)), dtype)
        y = gemm(x, pack(q), precision="highest")
        assert y.dtype == dtype
        wanted = np.asarray(x, np.float64) @ wide(q.dequantize())
        np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-4)


@FORMS
def test_everything_after_the_product(rng, form):
    q = weight(rng, "int4", (96, 34), 32)
    x = drawn(rng, 2, 5, 96)
    options = {
        "c": drawn(rng, 2, 5, 34),
        "bias": drawn(rng, 34),
        "alpha": 0.5,
        "beta": jnp.float32(2.5),
        "activation": "gelu",
        "residual": drawn(rng, 5, 34),
        "row_scale": drawn(rng, 2, 5),
        "column_scale": drawn(rng, 34),
    }
    given = {**options, "preferred_element_type": jnp.float32}
    wanted = gemm(x.astype(jnp.float32), q.dequantize(), precision="highest", **given)
    for dtype, tolerance in ((jnp.float32, 2e-2), (BF16, 4e-2)):
        given["preferred_element_type"] = dtype
        y = gemm(x, form(q), **given)
        assert y.dtype == dtype
        scale = float(jnp.abs(wanted).max())
        np.testing.assert_allclose(
            y.astype(jnp.float32), wanted, rtol=tolerance, atol=tolerance * scale
        )

    def f(z, s):
        assert z.dtype == jnp.float32
        return jnp.tanh(z / 8) * s, jnp.max(z, axis=-1)

    outer, largest = gemm(x, form(q), epilogue=f, epilogue_operands=(jnp.float32(3),))
    z = x.astype(jnp.float32) @ q.dequantize()
    wanted, allowed = f(z, 3), 2e-2 * float(jnp.abs(z).max())
    np.testing.assert_allclose(outer, wanted[0], atol=3 / 8 * allowed)
    np.testing.assert_allclose(largest, wanted[1], atol=allowed)


def test_transposed_operands(rng):
    q = weight(rng, "int8", (70, 66), 35)
    x = drawn(rng, 70, 4)
    check(q, x.T, gemm(x, pack(q), transpose_a=True))
    x = drawn(rng, 4, 66)
    for w in (pack(q), q):
        check(q.T, x, gemm(x, w, transpose_b=True))


@pytest.mark.parametrize(
    ("x_batch", "w_batch"),
    [((2,), ()), ((2, 3), ()), ((3,), (3,)), ((2, 3), (3,)), ((), (3,)), ((2, 1), (2, 3))],
    ids=str,
)
def test_leading_dimensions(rng, x_batch, w_batch):
    q = weight(rng, "uint4", (*w_batch, 66, 10), 33, has_zeros=True)
    x = drawn(rng, *x_batch, 4, 66)
    check(q, x, gemm(x, pack(q)))


@FORMS
def test_gated_gemm(rng, form):
    q, p = (weight(rng, "int4", (64, 24), 32, scale_dtype="float32") for _ in range(2))
    x = drawn(rng, 5, 64)
    biases = {"bias_gate": drawn(rng, 24), "bias_up": drawn(rng, 24)}
    y = gated_gemm(x, form(q), form(p), **biases)
    arrays = q.dequantize(BF16), p.dequantize(BF16)
    wanted = gated_gemm(x, *arrays, **biases)
    assert y.dtype == BF16
    np.testing.assert_allclose(wide(y), wide(wanted), rtol=2e-2, atol=1e-3)
    both = jax.tree.map(lambda *each: jnp.concatenate(each, axis=1), q, p)
    y = gated_gemm(x, form(both), activation="relu")
    wanted = gated_gemm(x, jnp.concatenate(arrays, axis=1), activation="relu")
    np.testing.assert_allclose(wide(y), wide(wanted), rtol=2e-2, atol=1e-3)

    def f(gate, up, s):
        return jnp.sin(gate) * up + s

    options = {"epilogue": f, "epilogue_operands": (jnp.float32(1),)}
    y = gated_gemm(x, form(q), form(p), preferred_element_type=jnp.float32, **options)
    wanted = gated_gemm(x, *arrays, preferred_element_type=jnp.float32, **options)
    np.testing.assert_allclose(y, wanted, rtol=2e-2, atol=2e-2)


@FORMS
def test_layers(rng, form):
    up = weight(rng, "int4", (64, 34), 32, scale_dtype="float32")
    down = weight(rng, "uint4", (34, 16), 17, has_zeros=True)
    x, b1, b2 = drawn(rng, 5, 64), drawn(rng, 34), drawn(rng, 16)
    options = {"residual": drawn(rng, 5, 16)}
    arrays = up.dequantize(BF16), down.dequantize(BF16)
    y = mlp(x, form(up), b1, form(down), b2, **options)
    wanted = mlp(x, arrays[0], b1, arrays[1], b2, **options)
    largest = float(jnp.abs(wanted).max())
    np.testing.assert_allclose(wide(y), wide(wanted), atol=2e-2 * largest)
    y = mlp(x, form(up), None, arrays[1], epilogue=jnp.tanh)
    np.testing.assert_allclose(
        wide(y), wide(mlp(x, arrays[0], None, arrays[1], epilogue=jnp.tanh)), atol=2e-2 * largest
    )
    y = gated_mlp(x, form(up), form(up), form(down), bias_up=b1, bias_down=b2, **options)
    wanted = gated_mlp(x, arrays[0], *arrays, bias_up=b1, bias_down=b2, **options)
    largest = float(jnp.abs(wanted).max())
    np.testing.assert_allclose(wide(y), wide(wanted), atol=2e-2 * largest)


def test_dot_general(rng):
    q = weight(rng, "int4", (2, 3, 64, 10), 32)
    w = pack(q)
    x = drawn(rng, 64, 3, 4, 2, 5)
    dims = ((0,), (2,)), ((3, 1), (0, 1))
    y = dot_general(x, w, dims)
    wanted = np.einsum("kjmin,ijkc->ijmnc", wide(x), wide(q.dequantize()))
    size = np.einsum("kjmin,ijkc->ijmnc", np.abs(wide(x)), np.abs(wide(q.dequantize())))
    close(y, wanted, size, 64)
    # The batch in another order, and the weight on the left.
    y = dot_general(w, x, (((2,), (0,)), ((1, 0), (1, 3))), preferred_element_type=jnp.float32)
    close(y, wanted.transpose(1, 0, 4, 2, 3), size.transpose(1, 0, 4, 2, 3), 64)
    # Dimensions that the packed product does not contract.
    z = drawn(rng, 10, 3)
    y = dot_general(w, z, (((3, 1), (0, 1)), ((), ())))
    wanted = np.einsum("ijkc,cj->ik", wide(q.dequantize()), wide(z))
    close(y, wanted, np.einsum("ijkc,cj->ik", np.abs(wide(q.dequantize())), np.abs(wide(z))), 30)
    plain = weight(rng, "int4", (64, 10), 32)
    v = drawn(rng, 64)
    for each in (pack(plain), plain):
        y = dot_general(v, each, (((0,), (0,)), ((), ())))
        a, b = wide(v), wide(plain.dequantize())
        close(y, a @ b, np.abs(a) @ np.abs(b), 64)


@FORMS
def test_ragged_dot(rng, form):
    q, p = (weight(rng, "int4", (3, 64, 10), 32) for _ in range(2))
    x, sizes = drawn(rng, 7, 64), jnp.array([3, 0, 2])
    w, v = q.dequantize(BF16), p.dequantize(BF16)
    options = {"bias": drawn(rng, 3, 10), "activation": "relu"}
    y = ragged_dot(x, form(q), sizes, **options)
    np.testing.assert_array_equal(wide(y), wide(ragged_dot(x, w, sizes, **options)))
    y = gated_ragged_dot(x, form(q), form(p), sizes)
    np.testing.assert_array_equal(wide(y), wide(gated_ragged_dot(x, w, v, sizes)))


def test_special_values(rng):
    q = weight(rng, "int4", (64, 4), 64, scale_dtype="float32")
    q = dataclasses.replace(q, scale=jnp.asarray([[jnp.nan, jnp.inf, 0, 1]], jnp.float32))
    y = gemm(jnp.ones((2, 64), BF16), pack(q))
    assert np.isnan(y[:, 0]).all()
    assert not np.isfinite(y[:, 1]).any()
    assert not np.any(y[:, 2])
    assert np.isfinite(y[:, 3]).all()


def test_float8_nan(rng):
    q = weight(rng, "float8_e4m3fn", (64, 4), 32)
    q = dataclasses.replace(q, qvalue=q.qvalue.at[40, 1].set(jnp.nan))
    w = pack(q)
    assert np.isnan(wide(w.scales[0, :, 0, :4])).tolist() == [
        [False] * 4,
        [False, True, False, False],
    ]
    for x in (jnp.ones((2, 64), BF16), jnp.zeros((2, 64), BF16)):
        assert np.isnan(gemm(x, w)).all(0).tolist() == [False, True, False, False]


@pytest.mark.parametrize("qtype", ["int4", "int8"])
def test_quantized_weights_of_models(rng, qtype):
    w = drawn(rng, 128, 24, dtype=jnp.float32)
    x = drawn(rng, 4, 128)
    q = quantize(w, qtype, tile=(64, 1), scale_dtype=BF16)
    y = gemm(x, pack(q))
    exact = wide(x) @ wide(w)
    error = np.linalg.norm(wide(y) - exact) / np.linalg.norm(exact)
    assert error < (0.2 if qtype == "int4" else 0.02)


X, W = jnp.ones((4, 64), BF16), pack(quantize(jnp.ones((64, 10)), jnp.int4, tile=(32, 1)))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: gemm(jnp.ones((4, 64), jnp.int8), W), TypeError, "a.dtype=int8 is not multiplied"),
        (lambda: gemm(X, W, b_scale=jnp.ones(())), TypeError, "8-bit arrays alone take b_scale"),
        (lambda: gemm(X[:, :9], W), ValueError, "a and b must agree in k, got 9 and 64"),
        (lambda: gemm(X, W, bias=jnp.ones(9)), ValueError, r"bias.shape=\(9,\) does not fit"),
        (lambda: gemm(X, W, config="sm90"), ValueError, "no kernel configuration for packed"),
        (lambda: gemm(X, W, preferred_element_type=jnp.int8), TypeError, "packed weight; accepted"),
        (lambda: gemm(X, W, bias=X, epilogue=jnp.sin), ValueError, "got bias as well"),
        (lambda: gemm(W, X), TypeError, "a must be an array"),
        (lambda: gated_gemm(X, W, pack(quantize(jnp.ones((64, 9)), "int4"))), ValueError, "w_up"),
        (lambda: mlp(X, pack(quantize(jnp.ones((2, 64, 9)), "int4")), None, W), ValueError, "w1"),
        (lambda: dot_general(W, W, (((0,), (0,)), ((), ()))), TypeError, "beside an array"),
        (lambda: dot_general(X, W, (((1,), (1,)), ((), ()))), TypeError, "contracting"),
        (lambda: ragged_dot(X, W, jnp.ones(1, jnp.int32)), ValueError, r"rhs.shape=\(64, 10\)"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_config(rng, monkeypatch):
    for config in (None, "xla"):
        gemm(X, W, config=config)
    if jax.default_backend() == "cpu":
        gemm(X, W, config="kernel")  # strict on GPUs alone
    assert "tcgemm_packed" in str(jax.make_jaxpr(functools.partial(gemm, config="xla"))(X, W))


# Derivatives and programs


def test_a_packed_weight_has_no_derivative(rng):
    p, sizes = pack(weight(rng, "int4", (2, 66, 70), 33, has_zeros=True)), jnp.array([2, 3])
    x = drawn(rng, 2, 5, 66)
    for f in (
        lambda p: gemm(x, p),
        lambda p: gemm(x.astype(jnp.float32), p),
        lambda p: gated_gemm(x, p, p),
        lambda p: ragged_dot(x[0], p, sizes),
    ):
        gradient = jax.grad(lambda p, f=f: f(p).sum(), allow_int=True)(p)
        assert gradient.values.dtype == jax.dtypes.float0
        assert not np.any(gradient.scales)


def test_layers_of_symbolic_rows(rng):
    layers = pack(weight(rng, "int4", (3, 64, 64), 32))
    x = drawn(rng, 4, 64)

    def model(x, layers):
        return jax.lax.scan(lambda x, w: (gemm(x, w, residual=x), None), x, layers)[0]

    (m,) = jax.export.symbolic_shape("m")
    types = jax.ShapeDtypeStruct((m, 64), BF16), jax.tree.map(jax.typeof, layers)
    exported = jax.export.export(
        program := jax.jit(model),
        platforms=("cpu", "cuda"),
        disabled_checks=jax_tcgemm.export_disabled_checks(),
    )(*types)
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(wide(again.call(x, layers)), wide(program(x, layers)))
    program(x, pack(weight(rng, "int4", (3, 64, 64), 32)))
    assert program._cache_size() == 1


def test_weights_stay_out_of_the_residuals(rng):
    p = pack(weight(rng, "int4", (64, 64), 32))
    _, pullback = jax.vjp(lambda x: gemm(x, p, activation="relu"), drawn(rng, 4, 64))
    sizes = [y.size * y.dtype.itemsize for y in jax.tree.leaves(pullback)]
    assert max(sizes) <= p.values.size  # never 64 x 64 numbers of 16 bits
