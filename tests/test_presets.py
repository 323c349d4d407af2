"""Presets of precision that JAX lacks on CPUs: XLA's highest precision takes their place there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tcgemm import (
    Fp8State,
    dot_general,
    export_disabled_checks,
    fp8_dot,
    gated_gemm,
    gemm,
    mlp,
    pack,
    quantize,
    ragged_dot,
)

pytestmark = pytest.mark.any_jax

BF16 = jnp.bfloat16
MATRICES = (((1,), (0,)), ((), ()))
X3, X9 = "TF32_TF32_F32_X3", "BF16_BF16_F32_X9"
F8 = "ANY_F8_ANY_F8_F32"


def worst(got, a, b):
    a, b = (np.asarray(x, np.complex128) for x in (a, b))
    return np.max(np.abs(np.asarray(got) - a @ b)) / np.max(np.abs(a) @ np.abs(b))


@pytest.mark.parametrize("precision", [X3, X9])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_dot_general(normal, precision, dtype):
    a, b = normal(64, 96).astype(dtype), normal(96, 48).astype(dtype)
    product = functools.partial(dot_general, dimension_numbers=MATRICES, precision=precision)
    assert worst(product(a, b), a, b) < 1e-6
    vector = dot_general(a[0], b, (((0,), (0,)), ((), ())), precision=precision)
    assert worst(vector[None], a[:1], b) < 1e-6
    ours = jax.grad(lambda a, b: jnp.sum(jnp.abs(product(a, b))), (0, 1))(a, b)
    plain = jax.grad(lambda a, b: jnp.sum(jnp.abs(a @ b)), (0, 1))(a, b)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), ours, plain)
    summed = jnp.einsum("mk,kn->nm", a, b, precision=precision, _dot_general=dot_general)
    assert worst(summed.T, a, b) < 1e-6


@pytest.mark.parametrize("precision", [X3, X9])
def test_quantized_operands(normal, precision):
    x, w = normal(64, 256), normal(256, 128)
    rows, columns = quantize(x, jnp.int8, tile=(1, -1)), quantize(w, jnp.int8, tile=(-1, 1))
    packed = pack(quantize(w, jnp.int4, tile=(128, 1)))
    pairs = [(rows, columns), (x, columns), (x, packed)]
    for lhs, rhs in pairs:
        result = dot_general(lhs, rhs, MATRICES, precision=precision)
        with jax.default_matmul_precision(precision):
            np.testing.assert_array_equal(dot_general(lhs, rhs, MATRICES), result)
        values = [x if isinstance(x, jax.Array) else x.dequantize() for x in (lhs, rhs)]
        assert worst(result, *values) < 1e-5


@pytest.mark.parametrize("precision", [F8, f"{F8}_FAST_ACCUM"])
def test_float8(normal, precision):
    a = normal(32, 64).astype(jnp.float8_e4m3fn)
    b = normal(64, 32).astype(jnp.float8_e4m3fn)
    options = {"precision": precision, "preferred_element_type": jnp.float32}
    assert worst(gemm(a, b, **options), a, b) < 1e-6
    assert worst(dot_general(a, b, MATRICES, **options), a, b) < 1e-6
    assert worst(ragged_dot(a, b[None], jnp.array([32]), **options), a, b) < 1e-6
    quantized = [quantize(x.astype(jnp.float32), jnp.float8_e4m3fn, tile=(-1, -1)) for x in (a, b)]
    result = dot_general(*quantized, MATRICES, precision=precision)
    assert worst(result, *(x.dequantize() for x in quantized)) < 1e-5


COMPLEX = ["TF32_TF32_F32", "BF16_BF16_F32", "F32_F32_F32", "F64_F64_F64", X3, X9]
COMPLEX += ["BF16_BF16_F32_X3", "BF16_BF16_F32_X6"]


@pytest.mark.parametrize("precision", COMPLEX)
@pytest.mark.parametrize("columns", [1, 4])
def test_complex_numbers_keep_their_imaginary_parts(normal, precision, columns):
    a = (normal(32, 8) + 1j * normal(32, 8)).astype(jnp.complex64)
    b = (normal(8, columns) + 1j * normal(8, columns)).astype(jnp.complex64)
    assert worst(gemm(a, b, precision=precision), a, b) < 1e-6
    assert worst(dot_general(a, b, MATRICES, precision=precision), a, b) < 1e-6
    real = normal(32, 8)
    assert worst(dot_general(real, b, MATRICES, precision=precision), real, b) < 1e-6


@pytest.mark.parametrize("precision", ["BF16_BF16_F32_X3", "BF16_BF16_F32_X6"])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (32, 1), (1, 5)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_few_rows(normal, precision, m, n, dtype):
    a, b = normal(m, 8).astype(dtype), normal(8, n).astype(dtype)
    rounded = 2**-7 if dtype == "bfloat16" else 1e-6
    assert worst(gemm(a, b, precision=precision), a, b) < rounded
    assert worst(dot_general(a, b, MATRICES, precision=precision), a, b) < rounded


@pytest.mark.parametrize("platforms", [("cpu", "tpu"), ("cpu", "rocm"), ("cpu", "cuda")])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: gemm(x, x, precision=X3),
        lambda x: gated_gemm(x, x, x, precision=X3),
        lambda x: ragged_dot(x, x[None], jnp.array([64]), precision=X3),
        lambda x: mlp(x, x, None, x, precision=X3),
        lambda x: dot_general(x, x, MATRICES, precision=X3),
    ],
)
def test_programs_for_several_platforms(normal, function, platforms):
    x = normal(64, 64)
    checks = export_disabled_checks()
    exported = jax.export.export(jax.jit(function), platforms=platforms, disabled_checks=checks)(x)
    np.testing.assert_allclose(exported.call(x), function(x), rtol=1e-5, atol=1e-5)


def _export(function, *operands):
    checks = export_disabled_checks()
    jitted, platforms = jax.jit(function), ("cpu", "cuda")
    return jax.export.export(jitted, platforms=platforms, disabled_checks=checks)(*operands)


@pytest.mark.parametrize("qtype", [jnp.int4, jnp.uint4, jnp.int8, jnp.float8_e4m3fn])
def test_quantized_products_with_symbolic_rows(normal, qtype):
    (rows,) = jax.export.symbolic_shape("m")
    w = quantize(normal(64, 48), qtype, tile=(-1, 1))
    exported = _export(
        lambda x, w: dot_general(x, w, MATRICES), jax.ShapeDtypeStruct((rows, 64), BF16), w
    )
    x = normal(5, 64, dtype=BF16)
    np.testing.assert_array_equal(exported.call(x, w), dot_general(x, w, MATRICES))


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_fp8_products_with_symbolic_rows(normal, recipe):
    (rows,) = jax.export.symbolic_shape("m")
    w = normal(128, 256, dtype=BF16)

    def loss(x):
        return jnp.sum(fp8_dot(x, w, recipe=recipe).astype(jnp.float32) ** 2)

    exported = _export(jax.value_and_grad(loss), jax.ShapeDtypeStruct((rows, 128), BF16))
    x = normal(130, 128, dtype=BF16)
    for got, expected in zip(exported.call(x), jax.value_and_grad(loss)(x), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-2)


def test_programs_with_states_are_serialized(normal):
    x, w = normal(8, 16, dtype=BF16), normal(16, 8, dtype=BF16)

    def step(state):
        loss = functools.partial(fp8_dot, x, w, recipe="delayed")
        return jax.grad(lambda state: loss(state=state).astype(jnp.float32).sum())(state)

    state = Fp8State.create(4)
    data = _export(step, state).serialize()
    after = jax.export.deserialize(data).call(state)
    assert isinstance(after, Fp8State)
    jax.tree.map(np.testing.assert_array_equal, after, step(state))
