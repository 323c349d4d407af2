"""Products of scaled and quantized operands, against float64 of the numbers they represent."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quantized_values import BF16_ROUNDING, E4M3, E5M2, INT8, MATRIX, assert_close, dequantized

from jax_tcgemm import ragged_dot
from jax_tcgemm.api.quantization import Quantized, quantize
from jax_tcgemm.api.scaled_dot import quantized_dot_general, scaled_dot

pytestmark = pytest.mark.any_jax

# Shapes and dimension numbers, then scales.
CONTRACTIONS = {
    "matrices": ((8, 256), (256, 16), None, (8, 2), (2, 1)),
    "kernel blocks": ((5, 256), (256, 128), None, (5, 2), (2, 1)),
    "rows and columns": ((5, 72), (72, 24), None, (5, 1), (1, 24)),
    "one scale": ((5, 72), (72, 24), None, (), (1,)),
    "one side": ((5, 72), (72, 24), None, (5, 1), None),
    "no scale": ((5, 72), (72, 24), None, None, None),
    "nothing": ((0, 256), (256, 128), None, (0, 2), (2, 1)),
    "both transposed": ((256, 8), (16, 256), (((0,), (1,)), ((), ())), (4, 8), (16, 4)),
    "batch": ((3, 8, 128), (3, 128, 16), None, (3, 8, 1), (1, 1, 16)),
    "copied batch": ((6, 4, 64), (64, 4, 5), (((2,), (0,)), ((1,), (1,))), (6, 2, 2), (1, 4, 5)),
    "many": (
        *((4, 8, 6, 10), (6, 10, 4, 2, 3), (((2, 3), (0, 1)), ((0,), (2,)))),
        *((2, 4, 2, 5), (2, 2, 2, 1, 3)),
    ),
    "other order": (
        (4, 6, 8, 10),
        (10, 6, 5),
        (((3, 1), (0, 1)), ((), ())),
        (2, 6, 1, 1),
        (5, 1, 1),
    ),
    "vector": ((16,), (16, 5), (((0,), (0,)), ((), ())), (4,), (16, 1)),
    "nothing contracted": ((4, 3), (2, 6), (((), ()), ((), ())), (4, 1), (1, 2)),
}
PAIRS = [(E4M3, E4M3), (E5M2, E4M3), (INT8, INT8), (E4M3, INT8), (jnp.bfloat16, E5M2)]


@pytest.mark.any_jax
@pytest.mark.parametrize("case", CONTRACTIONS.values(), ids=CONTRACTIONS)
def test_scaled_dot(normal, rng, case):
    *shapes, dims, lhs_scale, rhs_scale = case
    batch = tuple(range(len(shapes[0]) - 2))
    full = dims or (((len(shapes[0]) - 1,), (len(shapes[1]) - 2,)), (batch, batch))
    for i in rng.permutation(len(PAIRS))[:2]:  # compiling takes nearly all of the time
        lhs, rhs = (
            (normal(*shape) * 40).astype(dtype)
            for shape, dtype in zip(shapes, PAIRS[i], strict=True)
        )
        scales = [
            None if shape is None else jnp.asarray(rng.uniform(0.5, 2, shape), jnp.float32)
            for shape in (lhs_scale, rhs_scale)
        ]
        wide = [
            dequantized(x, s.reshape((1,) * x.ndim) if s is not None and s.size == 1 else s)
            for x, s in zip((lhs, rhs), scales, strict=True)
        ]
        dtype = [None, jnp.float32][rng.integers(2)]
        got = scaled_dot(
            lhs,
            rhs,
            lhs_scale=scales[0],
            rhs_scale=scales[1],
            dimension_numbers=dims,
            preferred_element_type=dtype,
        )
        assert got.dtype == (dtype or jnp.bfloat16)
        # Dequantized operands are rounded to bfloat16 for this result, in gemm or before it.
        is_rounded = dtype is None or jnp.bfloat16 in PAIRS[i]
        assert_close(got, *wide, full, BF16_ROUNDING if is_rounded else 0)


def test_scaled_dot_as_lax_has_it(normal):
    if not hasattr(jax.lax, "scaled_dot"):
        pytest.skip("this JAX has none")
    lhs, rhs = normal(2, 8, 64).astype(E4M3), normal(2, 64, 4).astype(E5M2)
    scales = {
        "lhs_scale": jnp.exp2(normal(2, 8, 2)).astype(jnp.float8_e8m0fnu),
        "rhs_scale": jnp.exp2(normal(2, 2, 4)).astype(jnp.float8_e8m0fnu),
    }
    wide = dequantized(lhs, scales["lhs_scale"]), dequantized(rhs, scales["rhs_scale"])
    full = ((2,), (1,)), ((0,), (0,))
    for function in (scaled_dot, jax.lax.scaled_dot):
        got = function(lhs, rhs, **scales)
        assert got.dtype == jnp.bfloat16
        assert_close(got, *wide, full)  # powers of two round nothing
        assert function(lhs, rhs).shape == got.shape


def test_integers_are_exact(rng):
    lhs, rhs = (jnp.asarray(rng.integers(-128, 128, s), INT8) for s in ((3, 500), (4, 500)))
    dims = ((1,), (1,)), ((), ())
    got = scaled_dot(lhs, rhs, dimension_numbers=dims, preferred_element_type=jnp.int32)
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, dequantized(lhs) @ dequantized(rhs).T)


def test_scaled_dot_transforms(normal):
    lhs, rhs, scale = normal(3, 8, 64).astype(E4M3), normal(64, 4).astype(E4M3), normal(3, 8, 1)
    mapped = jax.jit(jax.vmap(lambda x, s: scaled_dot(x, rhs, lhs_scale=s)))(lhs, scale)
    for i in range(3):
        np.testing.assert_array_equal(mapped[i], scaled_dot(lhs[i], rhs, lhs_scale=scale[i]))


def test_explicit_axes(normal):
    lhs, rhs, scale = normal(8, 64).astype(E4M3), normal(64, 4).astype(E4M3), normal(8, 2)
    types = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((2,), ("rows",), types, devices=jax.devices("cpu")[:2])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    wanted = scaled_dot(lhs, rhs, lhs_scale=scale)
    with jax.set_mesh(mesh):
        x, s = (jax.device_put(y, sharding) for y in (lhs, scale))
        got = jax.jit(lambda x, y, s: scaled_dot(x, y, lhs_scale=s))(x, rhs, s)
        assert jax.typeof(got).sharding.spec[0] == "rows"
    np.testing.assert_array_equal(got, wanted)


def test_what_scaled_dot_refuses():
    x = jnp.ones((8, 64), E4M3)
    with pytest.raises(ValueError, match=r"lhs_scale.shape=\(8, 3\) does not fit lhs.shape"):
        scaled_dot(x, x.T, lhs_scale=jnp.ones((8, 3)))
    with pytest.raises(TypeError, match="same rank of at least 2"):
        scaled_dot(x, x[0])
    with pytest.raises(TypeError, match="dot_general"):
        scaled_dot(x, x)


@pytest.mark.parametrize("scale_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("dtype", [E4M3, INT8])
def test_both_operands_quantized(normal, dtype, scale_dtype):
    lhs = quantize(normal(4, 6, 64), dtype, tile=(1, 1, -1), scale_dtype=scale_dtype)
    rhs = quantize(normal(64, 2, 5), dtype, tile=(-1, 1, 1), scale_dtype=scale_dtype)
    dims = ((2,), (0,)), ((), ())
    wide = dequantized(lhs.qvalue, lhs.scale), dequantized(rhs.qvalue, rhs.scale)
    got = quantized_dot_general(lhs, rhs, dims)
    assert got.dtype == scale_dtype
    assert_close(got, *wide, dims)
    got = jax.jit(lambda *x: quantized_dot_general(*x, dims, "highest", jnp.float16))(lhs, rhs)
    assert got.dtype == jnp.float16
    assert_close(got, *wide, dims)


def test_bytes_beside_what_is_quantized(normal, rng):
    q = quantize(normal(64, 5), INT8, tile=(-1, 1))
    x = jnp.asarray(rng.integers(-128, 128, (3, 64)), INT8)
    got = quantized_dot_general(x, q, MATRIX)
    assert got.dtype == jnp.float32
    assert_close(got, dequantized(x), dequantized(q.qvalue, q.scale), MATRIX)


@pytest.mark.parametrize("x_dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("dtype", [E4M3, INT8])
def test_a_float_operand_beside_it(normal, dtype, x_dtype):
    x, q = normal(3, 64, dtype=x_dtype), quantize(normal(64, 5), dtype, tile=(16, 1))
    rounding = 0 if x_dtype == jnp.float32 else BF16_ROUNDING
    for lhs, rhs, dims in ((x, q, MATRIX), (q, x, (((0,), (1,)), ((), ())))):
        got = quantized_dot_general(lhs, rhs, dims, precision="highest")
        assert got.dtype == x_dtype
        wide = [dequantized(y) if y is x else dequantized(y.qvalue, y.scale) for y in (lhs, rhs)]
        assert_close(got, *wide, dims, rounding)
    slope = jax.grad(lambda x: quantized_dot_general(x, q, MATRIX).sum())(x)
    assert slope.dtype == x_dtype


@pytest.mark.parametrize("scales", [((3, 1), (1, 5)), ((3, 1), (1, 1)), ((3, 4), (4, 5))])
@pytest.mark.parametrize(
    "zeros", [((3, 1), (1, 5)), ((1, 1), None), (None, (1, 1)), ((3, 2), None)]
)
def test_zero_points(rng, scales, zeros):
    values = [jnp.asarray(rng.integers(-128, 128, s), INT8) for s in ((3, 64), (64, 5))]
    operands = [
        Quantized(
            value,
            jnp.asarray(2.0 ** rng.integers(-3, 4, scale), jnp.float32),
            None if zero is None else jnp.asarray(rng.integers(-128, 128, zero), INT8),
        )
        for value, scale, zero in zip(values, scales, zeros, strict=True)
    ]
    wide = [dequantized(q.qvalue, q.scale, q.zero_point) for q in operands]
    got = quantized_dot_general(*operands, MATRIX, precision="highest")
    assert_close(got, *wide, MATRIX)
    turned = quantized_dot_general(operands[1].T, operands[0].T, MATRIX, precision="highest")
    assert_close(turned, wide[1].T, wide[0].T, MATRIX)
    if scales[0][1] == 1 and zeros != ((3, 2), None):  # all sums are below 2^24
        np.testing.assert_array_equal(got, wide[0] @ wide[1])
        np.testing.assert_array_equal(turned, got.T)


def test_zero_points_of_sums_that_wrap_around():
    k = 33025
    x = Quantized(jnp.full((1, k), 127, INT8), jnp.ones((1, 1)), jnp.full((1, 1), -128, INT8))
    got = quantized_dot_general(x, x.T, MATRIX)
    assert float(got[0, 0]) == np.float32(255**2 * k)


def test_objects_with_the_same_fields(normal):
    q = quantize(normal(64, 5), INT8, tile=(-1, 1))
    other = types.SimpleNamespace(qvalue=q.qvalue, scale=q.scale, zero_point=None, qtype="int8")
    for x in (normal(3, 64), quantize(normal(3, 64), INT8)):
        got = quantized_dot_general(x, other, MATRIX)
        np.testing.assert_array_equal(got, quantized_dot_general(x, q, MATRIX))


def test_what_quantized_dot_general_refuses(normal):
    q = quantize(normal(64, 5), INT8)
    with pytest.raises(ValueError, match=r"zero_point.shape=\(3, 5\) does not fit"):
        quantized_dot_general(
            q, Quantized(q.qvalue, q.scale, q.qvalue[:3]), (((0,), (0,)), ((), ()))
        )
    with pytest.raises(TypeError, match="lhs must be an array"):
        quantized_dot_general("x", q, MATRIX)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"bias": jnp.full((2, 6), 1j)}, TypeError),
        ({"bias": jnp.float32(1)}, ValueError),
        ({"bias": jnp.ones((2, 1))}, ValueError),
        ({"preferred_element_type": jnp.int32}, TypeError),
        ({"preferred_element_type": jnp.int32, "activation": "tanh"}, TypeError),
    ],
)
@pytest.mark.parametrize("dtype", [INT8, jnp.int4], ids=lambda dtype: dtype.__name__)
def test_ragged_dot_checks_arguments_of_quantized_operands(options, error, dtype):
    x, w = quantize(jnp.ones((4, 8)), dtype), quantize(jnp.ones((2, 8, 6)), dtype)
    with pytest.raises(error, match=r"bias|preferred_element_type"):
        ragged_dot(x, w, jnp.asarray([2, 1]), **options)


def test_products_without_zero_points_are_floats():
    x = Quantized(jnp.ones((4, 4), jnp.int8), jnp.ones((1, 1)), jnp.ones((1, 1), jnp.int8))
    with pytest.raises(TypeError, match="int32 is not the type of a product with scales"):
        quantized_dot_general(x, x, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)
