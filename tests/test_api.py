"""`gemm` against `jnp.matmul` and the formula: shapes, dtypes, promotion, precision."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import DotAlgorithmPreset, Precision

import jax_tcgemm
from jax_tcgemm import gated_gemm, gemm, mlp
from jax_tcgemm.problem.arithmetic import resolve_algorithm
from jax_tcgemm.problem.log import print_once

FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32)
BATCHES = [
    ((), ()),
    ((3,), ()),
    ((), (3,)),
    ((3,), (3,)),
    ((3,), (1,)),
    ((1,), (1,)),
    ((2, 3), (3,)),
    ((2, 1), (1, 3)),
    ((2, 1, 3), (4, 1)),
    ((0,), (1,)),
]


def _layout(x: jax.Array, transposed: bool) -> jax.Array:
    return x.mT if transposed else x


@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_layouts(normal, exact, assert_accurate, dtype, transpose_a, transpose_b):
    a, b = normal(9, 17, dtype=dtype), normal(17, 5, dtype=dtype)
    stored = _layout(a, transpose_a), _layout(b, transpose_b)
    got = gemm(*stored, transpose_a=transpose_a, transpose_b=transpose_b)
    assert got.dtype == dtype
    assert_accurate(got, jnp.matmul(a, b), exact(a) @ exact(b))


@pytest.mark.parametrize(("a_batch", "b_batch"), BATCHES)
def test_batch_broadcasting(normal, exact, assert_accurate, a_batch, b_batch):
    a, b = normal(*a_batch, 4, 6), normal(*b_batch, 6, 5)
    c, bias = normal(4, 1), normal(5)
    expected = exact(a) @ exact(b) + exact(c) + exact(bias)
    assert_accurate(gemm(a, b, c, bias=bias), jnp.matmul(a, b) + c + bias, expected)


@pytest.mark.parametrize(("m", "n", "k"), list(itertools.product((0, 1, 3), repeat=3)))
def test_empty_and_single(normal, exact, m, n, k):
    a, b, bias = normal(2, m, k), normal(k, n), normal(n)
    got = gemm(a, b, bias=bias, activation="relu")
    expected = np.maximum(exact(a) @ exact(b) + exact(bias), 0)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "dtypes",
    [
        *itertools.combinations_with_replacement(
            (jnp.bool_, jnp.int8, jnp.uint8, jnp.int32, *FLOATS, jnp.complex64), 2
        ),
        (jnp.float8_e4m3fn, jnp.float8_e4m3fn),
    ],
    ids=lambda dtypes: "-".join(jnp.dtype(dtype).name for dtype in dtypes),
)
def test_promotion(normal, exact, dtypes):
    a, b = normal(3, 4, dtype=dtypes[0]), normal(4, 2, dtype=dtypes[1])
    got, expected = gemm(a, b), jnp.matmul(a, b)
    assert got.dtype == expected.dtype
    eps = 0.25 if got.dtype.itemsize == 1 else 2e-2 if got.dtype.itemsize == 2 else 1e-5
    np.testing.assert_allclose(exact(got), exact(expected), rtol=eps, atol=eps)


@pytest.mark.parametrize("scalar", [2, 2.0], ids=["int", "float"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_weak_types(normal, dtype, scalar):
    strong = normal(3, 3, dtype=dtype)
    as_weak = jax.lax.broadcast_in_dim(jnp.asarray(scalar), (3, 3), ())
    for operands in ((strong, as_weak), (as_weak, strong), (as_weak, as_weak)):
        got, expected = gemm(*operands), jnp.matmul(*operands)
        assert got.dtype == expected.dtype
        assert jax.typeof(got).weak_type == jax.typeof(expected).weak_type
        rtol = 2e-2 if got.dtype.itemsize == 2 else 1e-6
        np.testing.assert_allclose(np.float64(got), np.float64(expected), rtol=rtol, atol=rtol)


@pytest.mark.parametrize("strong", [None, "w", "b", "c", "residual", "alpha"])
@pytest.mark.parametrize("preferred", [None, jnp.float32])
def test_a_result_is_weak_where_all_operands_are(strong, preferred):
    """A result is weakly typed, as in `jnp`, if all operands are and no type is requested."""
    shapes = {"x": (2, 2), "w": (2, 2), "b": (2,), "c": (2, 2), "residual": (2, 2), "alpha": ()}
    values = {
        name: jnp.ones(shape) if name == strong else jax.lax.full(shape, 1.0)
        for name, shape in shapes.items()
    }
    x, w, b, c, residual, alpha = values.values()
    options = {"preferred_element_type": preferred}
    matmul = functools.partial(jnp.matmul, **options)
    for got, expected in (
        (gemm(x, w, **options), matmul(x, w)),
        (
            gemm(x, w, c, bias=b, alpha=alpha, beta=2.0, **options),
            alpha * matmul(x, w) + 2.0 * c + b,
        ),
        (
            gemm(x, w, bias=b, activation="relu", residual=residual, **options),
            jnp.maximum(matmul(x, w) + b, 0) + residual,
        ),
        (
            gated_gemm(x, w, w, bias_gate=b, activation=None, **options),
            (matmul(x, w) + b) * matmul(x, w),
        ),
        (
            mlp(x, w, b, w, activation="relu", residual=residual, **options),
            matmul(jnp.maximum(x @ w + b, 0), w) + residual,
        ),
    ):
        assert jax.typeof(got).weak_type == jax.typeof(expected).weak_type


def test_float64(normal, exact):
    with jax.enable_x64(True):
        a, b = normal(20, 30, dtype=jnp.float64), normal(30, 10, dtype=jnp.float64)
        bias, alpha = normal(10, dtype=jnp.float64), normal(dtype=jnp.float64)
        got = gemm(a, b, bias=bias, alpha=alpha, activation="tanh")
        assert got.dtype == jnp.float64
        expected = np.tanh(exact(alpha) * (exact(a) @ exact(b)) + exact(bias))
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)
        wide = gemm(
            a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), preferred_element_type=jnp.float64
        )
        assert wide.dtype == jnp.float64


@pytest.mark.parametrize("preferred", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e5m2])
@pytest.mark.parametrize("dtype", FLOATS)
def test_preferred_element_type(normal, exact, assert_accurate, dtype, preferred):
    a, b = normal(6, 40, dtype=dtype), normal(40, 7, dtype=dtype)
    got = gemm(a, b, preferred_element_type=preferred)
    assert got.dtype == preferred
    baseline = jnp.matmul(a, b, preferred_element_type=jnp.float32).astype(preferred)
    assert_accurate(got, baseline, exact(a) @ exact(b))


def test_integers_stay_integers(normal):
    a, b = normal(4, 5, dtype=jnp.int8), normal(5, 3, dtype=jnp.int8)
    c, bias = normal(4, 3, dtype=jnp.int32), normal(3, dtype=jnp.int16)
    got = gemm(a, b, c, bias=bias, alpha=3, beta=-2, preferred_element_type=jnp.int32)
    assert got.dtype == jnp.int32
    product = np.asarray(a, np.int64) @ np.asarray(b, np.int64)
    np.testing.assert_array_equal(got, 3 * product - 2 * np.asarray(c) + np.asarray(bias))


def test_complex_scalars(normal, exact):
    a, b = normal(4, 5, dtype=jnp.complex64), normal(5, 3, dtype=jnp.complex64)
    c = normal(3)
    got = gemm(a, b, c, alpha=2j, beta=jnp.complex64(1 - 1j))
    expected = 2j * (exact(a) @ exact(b)) + (1 - 1j) * exact(c)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("c_shape", [(), (1,), (5,), (4, 1), (4, 5), (3, 1, 5), (2, 1, 4, 5)])
@pytest.mark.parametrize("bias_shape", [(5,), (1, 5), (3, 5), (2, 1, 5), (2, 3, 5)])
def test_addend_shapes(normal, exact, c_shape, bias_shape):
    a, b, c, bias = normal(2, 3, 4, 6), normal(3, 6, 5), normal(*c_shape), normal(*bias_shape)
    got = gemm(a, b, c, bias=bias, alpha=0.5, beta=jnp.float32(-1.5))
    expected = 0.5 * (exact(a) @ exact(b)) - 1.5 * exact(c) + exact(bias)[..., None, :]
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_addends_do_not_widen(normal):
    a, b = normal(4, 6, dtype=jnp.bfloat16), normal(6, 5, dtype=jnp.bfloat16)
    got = gemm(a, b, normal(4, 5), bias=normal(5), alpha=jnp.float32(2), beta=np.float64(0.5))
    assert got.dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_epilogue_rounds_once(normal, exact, dtype):
    a, b = normal(32, 64, dtype=dtype), normal(64, 48, dtype=dtype)
    c, bias = normal(32, 48), normal(48)
    got = gemm(a, b, c, bias=bias, alpha=0.25, activation="gelu")
    z = 0.25 * (exact(a) @ exact(b)) + exact(c) + exact(bias)
    expected = exact(jax.nn.gelu(jnp.asarray(z, jnp.float32)))
    spacing = np.abs(expected) * float(jnp.finfo(dtype).eps) / 2
    assert np.all(np.abs(exact(got) - expected) <= 1.01 * spacing + 1e-5)


def test_numpy_operands(normal):
    a, b = np.asarray(normal(3, 4)), np.asarray(normal(4, 5))
    np.testing.assert_allclose(gemm(a, b), a @ b, rtol=1e-5, atol=1e-6)


DEFAULT = (Precision.DEFAULT,) * 2
HIGH = (Precision.HIGH,) * 2
HIGHEST = (Precision.HIGHEST,) * 2
P = DotAlgorithmPreset
bf16, f16, f32, f64, i8 = (
    jnp.dtype(dtype) for dtype in (jnp.bfloat16, jnp.float16, jnp.float32, np.float64, jnp.int8)
)


@pytest.mark.parametrize(
    ("a", "b", "out", "precision", "algorithm"),
    [
        (bf16, bf16, bf16, DEFAULT, "BF16_BF16_F32"),
        (bf16, bf16, f32, HIGHEST, "BF16_BF16_F32"),
        (f16, f16, f16, HIGH, "F16_F16_F32"),
        (f16, f16, f16, P.F16_F16_F16, "F16_F16_F16"),
        (f16, f16, f32, P.DEFAULT, "F16_F16_F32"),
        (f32, f32, f32, DEFAULT, "TF32_TF32_F32"),
        (f32, f32, f32, HIGH, "TF32_TF32_F32"),
        (f32, f32, f32, P.TF32_TF32_F32, "TF32_TF32_F32"),
        (f32, f32, bf16, DEFAULT, "TF32_TF32_F32"),
        (f32, f32, f32, P.BF16_BF16_F32, "BF16_BF16_F32"),
        (f32, bf16, f32, P.BF16_BF16_F32, "BF16_BF16_F32"),
        (f32, bf16, bf16, DEFAULT, "TF32_TF32_F32"),
        (f16, bf16, f32, DEFAULT, None),
        (f16, bf16, f32, P.TF32_TF32_F32, "TF32_TF32_F32"),
        (i8, bf16, bf16, DEFAULT, "BF16_BF16_F32"),
        (f32, f32, f32, HIGHEST, None),
        (f32, f32, f32, (Precision.DEFAULT, Precision.HIGHEST), None),
        (f32, f32, f32, P.F32_F32_F32, None),
        (f32, f32, f32, P.TF32_TF32_F32_X3, None),
        (bf16, bf16, bf16, P.BF16_BF16_BF16, None),
        (bf16, bf16, f64, DEFAULT, None),
        (f64, f64, f64, DEFAULT, None),
        (i8, i8, i8, DEFAULT, None),
        (i8, i8, f32, DEFAULT, None),
    ],
)
def test_algorithm(a, b, out, precision, algorithm):
    assert resolve_algorithm(a, b, out, precision) == algorithm


@pytest.mark.parametrize("precision", ["BF16_BF16_F32", "F16_F16_F32", "TF32_TF32_F32"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_presets_convert_and_keep_the_result_type(normal, exact, precision, dtype):
    a, b = normal(8, 33, dtype=dtype), normal(33, 6, dtype=dtype)
    got = gemm(a, b, precision=precision)
    assert got.dtype == dtype
    kind = {"B": jnp.bfloat16, "F": jnp.float16, "T": jnp.float32}[precision[0]]
    expected = exact(a.astype(kind)) @ exact(b.astype(kind))
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(exact(got), expected, rtol=eps, atol=2e-5)


def test_f16_accumulation(normal, exact):
    a, b = normal(8, 64, dtype=jnp.float16), normal(64, 8, dtype=jnp.float16)
    got = gemm(a, b, precision="F16_F16_F16", preferred_element_type=jnp.float32)
    np.testing.assert_allclose(got, exact(a) @ exact(b), rtol=5e-2, atol=5e-2)


def test_default_matmul_precision_is_respected(normal, cuda_module):
    a, b = normal(16, 16), normal(16, 16)
    with jax.default_matmul_precision("highest"):
        text, calls = cuda_module(lambda a, b: gemm(a, b), a, b)
    assert not calls
    assert "HIGHEST" in text
    with jax.default_matmul_precision("BF16_BF16_F32"):
        _, (call,) = cuda_module(lambda a, b: gemm(a, b), a, b)
    assert call["algorithm"] == "BF16_BF16_F32"
    _, (call,) = cuda_module(lambda a, b: gemm(a, b), a, b)
    assert call["algorithm"] == "TF32_TF32_F32"


def test_log_says_what_was_chosen(normal, monkeypatch, capsys, cuda_module):
    print_once.cache_clear()
    monkeypatch.setenv("JAX_TCGEMM_LOG", "1")
    a, b = normal(11, 13), normal(13, 12)
    cuda_module(lambda a, b: gemm(a, b), a, b)
    cuda_module(lambda a, b: gemm(a, b, precision="highest"), a, b)
    jax.jit(lambda a, b: gemm(a, b))(a, b)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert "TF32_TF32_F32" in lines[0]
    assert "fallback" in lines[1]
    assert "HIGHEST" in lines[1]
    assert "no kernels for this platform" in lines[2]
    jax.jit(lambda a, b: gemm(a, b) + 1)(a, b)
    assert not capsys.readouterr().err


def test_version():
    assert jax_tcgemm.__version__.count(".") >= 2
