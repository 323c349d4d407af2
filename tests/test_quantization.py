"""Quantization: values, scales and the numbers they represent."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quantized_values import E4M3, E5M2, INT8, LARGEST, dequantized, repeated

from jax_tcgemm import Quantized, pack, quantize, ragged_dot, unpack

TYPES = pytest.mark.parametrize("dtype", LARGEST, ids=lambda dtype: dtype.__name__)
TILES = [None, (1, 128), (128, 128), (1, -1), (None, 1), (2, 64), (1, 1)]
BF16_ROUNDING = 2**-8


def division_rounding() -> float:
    """Returns the largest relative error of XLA's float32 division.

    On a CPU, division may be a multiplication by the reciprocal, which is rounded as well. On a GPU
    the error is within 2 ulp (`div.full` of the PTX ISA).
    """
    return 2**-21 if jax.default_backend() == "gpu" else 2**-23


def step(dtype, magnitude: np.ndarray) -> np.ndarray:
    """Returns the distance between neighbouring numbers of a type at a magnitude."""
    if dtype == INT8:
        return np.ones_like(magnitude)
    bits, lowest = (3, -6) if dtype == E4M3 else (2, -14)
    exponent = np.floor(np.log2(np.maximum(magnitude, 2.0**lowest)))
    return 2.0 ** (exponent - bits)


@pytest.mark.parametrize("tile", TILES, ids=str)
@TYPES
def test_values_and_scales(normal, exact, dtype, tile):
    x = normal(256, 128) * jnp.exp(normal(256, 1))
    rounding = division_rounding()
    for power_of_two in (False, True):
        q = quantize(x, dtype, tile=tile, power_of_two=power_of_two)
        assert q.qvalue.dtype == q.qtype == dtype
        assert q.scale.dtype == q.dtype == jnp.float32
        extents = [
            n if tile is None or block in (None, -1) else block
            for n, block in zip(x.shape, tile or x.shape, strict=True)
        ]
        counts = [n // block for n, block in zip(x.shape, extents, strict=True)]
        assert q.scale.shape == tuple(counts)
        blocks = np.abs(exact(x)).reshape(counts[0], extents[0], counts[1], extents[1])
        least = blocks.max((1, 3)) / LARGEST[dtype]
        scale = exact(q.scale)
        if power_of_two:
            assert np.all(np.log2(scale) == np.round(np.log2(scale)))
            assert np.all((scale >= least * (1 - rounding)) & (scale < 2 * least * (1 + rounding)))
        else:
            np.testing.assert_allclose(scale, least, rtol=rounding)
        scale = repeated(scale, x.shape)
        scaled = np.abs(exact(x)) / scale
        # Half a step of the number, which float32's division may have rounded first.
        allowed = (step(dtype, scaled * (1 + 2 * rounding)) / 2 + scaled * 2 * rounding) * scale
        error = np.abs(dequantized(q.qvalue, q.scale) - exact(x))
        assert np.all(error <= allowed)
        assert np.abs(exact(q.qvalue)).max() <= LARGEST[dtype]
        np.testing.assert_array_equal(
            q.dequantize(), dequantized(q.qvalue, q.scale).astype(np.float32)
        )


@pytest.mark.parametrize("x_dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_integers_are_rounded_to_nearest_even(x_dtype):
    x = jnp.asarray([127, 0.5, 1.5, -2.5, 2.75, -127, 0, 126.5], x_dtype)
    assert quantize(x, INT8).qvalue.tolist() == [127, 0, 2, -2, 3, -127, 0, 126]


@TYPES
def test_blocks_of_zeros_and_of_what_is_not_finite(dtype):
    x = jnp.asarray([[0, -0.0], [1, jnp.nan], [jnp.inf, 2], [3, -4], [1e-44, 0]], jnp.float32)
    q = quantize(x, dtype, tile=(1, -1))
    assert q.scale[0, 0] == 1
    assert np.isnan(q.scale[:, 0]).tolist() == [False, True, True, False, False]
    values = q.dequantize()
    assert np.isnan(values).all(1).tolist() == [False, True, True, False, False]
    np.testing.assert_allclose(values[3], x[3], rtol=0.07)
    assert float(jnp.abs(values[4]).max()) < 2**-125  # no division by zero


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e8m0fnu"])
@TYPES
def test_scale_dtypes(normal, exact, dtype, name):
    x = normal(4, 64)
    q = quantize(x, dtype, tile=(1, 32), scale_dtype=name)
    assert q.scale.dtype == name
    scale = repeated(q.scale, x.shape)
    scaled = exact(x) / scale
    half = step(dtype, np.abs(scaled)) / 2
    # A rounded-down scale makes the largest value clip.
    clipped = np.maximum(np.abs(scaled) - LARGEST[dtype], 0)
    error = np.abs(exact(q.qvalue) - scaled)
    assert np.all(error <= half * (1 + 2**-20) + clipped)
    assert clipped.max() <= (0 if name == "float8_e8m0fnu" else LARGEST[dtype] * 2**-8)
    largest = quantize(jnp.full((2, 2), 3e38), dtype, scale_dtype="float16")
    assert np.isfinite(exact(largest.scale)).all()


@pytest.mark.parametrize("tile", [(128, 1), (32, 1), (-1, 1), None], ids=str)
@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16"])
def test_four_bits(normal, exact, tile, scale_dtype):
    x = normal(256, 24) * jnp.exp(normal(1, 24)) + normal(1, 24)
    q = quantize(x, jnp.int4, tile=tile, scale_dtype=scale_dtype)
    u = quantize(x, jnp.uint4, tile=tile, scale_dtype=scale_dtype)
    for each in (q, u):
        assert each.qvalue.dtype == each.qtype
        assert each.scale.dtype == each.dtype == scale_dtype
    assert np.abs(exact(q.qvalue)).max() == 7
    # A rounded scale can be too large for 15 steps between a block's smallest and largest value.
    assert exact(u.qvalue).min() == 0
    assert exact(u.qvalue).max() in ({15} if scale_dtype == "float32" else {14, 15})
    assert q.zero_point is None
    assert u.zero_point is not None
    assert (u.zero_point.dtype, u.zero_point.shape) == (jnp.uint4, u.scale.shape)
    zero = repeated(exact(u.zero_point), x.shape)
    steps_of_u = np.clip(exact(x) / repeated(exact(u.scale), x.shape), -zero, 15 - zero)
    assert np.all(np.abs(exact(u.qvalue) - zero - steps_of_u) <= 0.5 + 1e-5)
    # A scale that was rounded down makes the largest value clip. The zero point is rounded, too.
    rounding = 0.0 if scale_dtype == "float32" else BF16_ROUNDING
    for each, zeros, half, steps in ((q, 0, 0.5, 7), (u, zero, 1.0, 15)):
        scale = repeated(exact(each.scale), x.shape)
        values = (exact(each.qvalue) - zeros) * scale
        assert np.all(np.abs(values - exact(x)) <= (half + 1e-5 + steps * rounding) * scale)
        np.testing.assert_allclose(each.dequantize(), values, rtol=2**-23)
        turned = each.T.dequantize(jnp.bfloat16)
        np.testing.assert_array_equal(turned, each.dequantize(jnp.bfloat16).T)


def test_four_bits_of_zeros_and_of_what_is_not_finite():
    x = jnp.asarray([[0.0, -0.0], [1, jnp.nan], [jnp.inf, 2], [3, 1], [-4, -1]], jnp.float32)
    for dtype in (jnp.int4, jnp.uint4):
        values = quantize(x, dtype, tile=(1, -1)).dequantize()
        assert np.isnan(values).all(1).tolist() == [False, True, True, False, False]
        assert not np.any(values[0])
        np.testing.assert_allclose(values[3:, 0], [3, -4], rtol=1e-6)  # zero is in the range


def test_powers_of_two_stay_what_they_are():
    x = jnp.asarray([[448.0], [449.0], [2.0**-140], [2.0**-110 * 448]])
    q = quantize(x, E4M3, tile=(1, 1), power_of_two=True)
    assert q.scale[:2, 0].tolist() == [1, 2]
    assert q.scale[3, 0] == 2.0**-110
    q = quantize(x, E4M3, tile=(1, 1), scale_dtype="float8_e8m0fnu")
    assert q.scale[:2, 0].astype(jnp.float32).tolist() == [1, 2]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 128)])
def test_empty_arrays_and_scalars(shape):
    q = quantize(jnp.ones(shape), E4M3)
    assert q.shape == q.dequantize().shape == shape
    assert q.scale.shape == (1,) * len(shape)
    blocks = quantize(jnp.ones((0, 128)), INT8, tile=(4, 128))
    assert blocks.scale.shape == (0, 1)
    assert blocks.dequantize().shape == (0, 128)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tile": (1, 100)}, ValueError, r"tile=\(1, 100\).*100 does not divide 128"),
        ({"tile": (128,)}, ValueError, r"tile=\(128,\).*\(4, 128\)"),
        ({"tile": (1, 0)}, ValueError, "0 does not divide 128"),
        ({"tile": (1, -2)}, ValueError, "-2 does not divide 128"),
        ({"tile": 128}, ValueError, "tile=128"),
        ({"dtype": jnp.int2}, TypeError, "int2.*accepted: .*float8_e5m2, int8, int4, uint4"),
        ({"dtype": "nonsense"}, TypeError, "dtype='nonsense'"),
        ({"scale_dtype": jnp.int32}, TypeError, "scale_dtype.*accepted: float32"),
        ({"x": jnp.ones((4, 128), jnp.int32)}, TypeError, "x.dtype=int32"),
        ({"x": jnp.ones((4, 128), E4M3)}, TypeError, "x.dtype=float8_e4m3fn"),
    ],
)
def test_what_quantize_refuses(options, error, message):
    arguments = {"x": jnp.ones((4, 128)), "dtype": E4M3} | options
    with pytest.raises(error, match=message):
        quantize(**arguments)


def test_a_list_is_a_tile():
    assert quantize(jnp.ones((4, 128)), E4M3, tile=[2, 64]).scale.shape == (2, 2)


def test_quantized_is_a_pytree(normal):
    x = normal(3, 4, 128)
    q = jax.jit(lambda x: quantize(x, INT8, tile=(1, 2, 64)))(x)
    leaves, tree = jax.tree.flatten(q)
    assert len(leaves) == 2
    again = jax.tree.unflatten(tree, leaves)
    assert again.qtype == INT8
    assert jax.tree.map(lambda x: None, q).qtype == INT8
    mapped = jax.vmap(lambda x: quantize(x, INT8, tile=(2, 64)))(x)
    np.testing.assert_array_equal(mapped.qvalue, q.qvalue)
    np.testing.assert_array_equal(mapped.scale, q.scale)
    back = jax.vmap(lambda q: q.dequantize(jnp.bfloat16))(q)
    np.testing.assert_array_equal(back, q.dequantize(jnp.bfloat16))


def test_transpositions(normal):
    q = quantize(normal(3, 4, 128), E5M2, tile=(1, 2, 64))
    assert (q.T.shape, q.T.scale.shape) == ((128, 4, 3), (2, 2, 3))
    for turned, axes in ((q.T, (2, 1, 0)), (q.mT, (0, 2, 1)), (q.transpose(1, 0, 2), (1, 0, 2))):
        np.testing.assert_array_equal(turned.dequantize(), q.dequantize().transpose(axes))


def test_scales_and_zero_points_that_do_not_fit():
    value = jnp.ones((4, 6), INT8)
    with pytest.raises(
        ValueError, match=r"scale.shape=\(4, 4\) does not fit qvalue.shape=\(4, 6\)"
    ):
        Quantized(value, jnp.ones((4, 4))).dequantize()
    with pytest.raises(ValueError, match=r"zero_point.shape=\(1,\)"):
        Quantized(value, jnp.ones((1, 1)), jnp.ones(1, INT8)).dequantize()


@pytest.mark.any_jax
@pytest.mark.parametrize("dtype", [INT8, E4M3], ids=lambda dtype: jnp.dtype(dtype).name)
@pytest.mark.parametrize("tile", [None, (1, -1, 1), (1, -1, -1), (-1, -1, 1), (1, 4, 1)])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_ragged_dot_of_quantized_operands(dtype, tile, is_transposed):
    rng = np.random.default_rng(0)
    m, k, n, groups = 13, 8, 6, 3
    x = quantize(rng.normal(size=(m, k)).astype(np.float32), dtype, tile=(1, -1))
    w = quantize(rng.normal(size=(groups, k, n)).astype(np.float32), dtype, tile=tile)
    sizes = jnp.array([5, -2, 4])
    bias = jnp.asarray(rng.normal(size=(groups, n)), jnp.float32)
    options = {"bias": bias, "activation": "gelu", "transpose_rhs": is_transposed}
    given = w.transpose(0, 2, 1) if is_transposed else w
    y = ragged_dot(x, given, sizes, precision="highest", **options)
    wide = x.dequantize(), given.dequantize()
    wanted = ragged_dot(*wide, sizes, precision="highest", **options)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5)
    assert not np.any(y[9:])

    def f(acc, scale):
        return (jnp.tanh(acc) * scale).astype(jnp.bfloat16)

    given_f = {
        "epilogue": f,
        "epilogue_operands": (jnp.float32(2),),
        "transpose_rhs": is_transposed,
    }
    y = ragged_dot(x, given, sizes, precision="highest", **given_f)
    wanted = ragged_dot(*wide, sizes, precision="highest", **given_f)
    np.testing.assert_allclose(y.astype(jnp.float32), wanted.astype(jnp.float32), rtol=1e-2)
    # If only one factor is quantized, it is dequantized.
    half = ragged_dot(wide[0].astype(jnp.bfloat16), given, sizes, transpose_rhs=is_transposed)
    assert half.dtype == jnp.bfloat16


def test_ragged_dot_of_quantized_operands_refuses_and_keeps_types():
    rng = np.random.default_rng(0)
    x = quantize(rng.normal(size=(6, 8)).astype(np.float32), INT8, tile=(1, -1))
    w = quantize(rng.normal(size=(2, 8, 4)).astype(np.float32), INT8, tile=(1, -1, 1))
    sizes = jnp.array([2, 3])
    with pytest.raises(ValueError, match="got bias as well"):
        ragged_dot(x, w, sizes, bias=jnp.ones((2, 4)), epilogue=jnp.sin)
    with pytest.raises(TypeError, match="must be a function"):
        ragged_dot(x, w, sizes, epilogue=3)
    with pytest.raises(ValueError, match=r"lhs must be \(m, k\)"):
        ragged_dot(quantize(np.ones(8, np.float32), INT8), w, sizes)
    wide = rng.normal(size=(6, 8)).astype(np.float32)
    y = ragged_dot(wide, w, sizes, epilogue=jnp.sin, preferred_element_type=jnp.bfloat16)
    assert y.dtype == jnp.bfloat16
    nothing = quantize(np.ones((0, 8), np.float32), INT8, tile=(1, -1))
    assert ragged_dot(nothing, w, sizes).shape == (0, 4)


@TYPES
@pytest.mark.parametrize("dtype_of_x", [jnp.float32, jnp.bfloat16])
def test_a_nan_anywhere_shows(dtype, dtype_of_x):
    """XLA's maximum may ignore a NaN on CPUs, above all the last one of a large array."""
    rng = np.random.default_rng()
    for at in (0, 8191, *rng.integers(0, 8192, 4)):
        x = rng.standard_normal(8192).astype(np.float32) * 1e-3
        x[at] = np.nan
        x = jnp.asarray(x.reshape(64, 128), dtype_of_x)
        whole = quantize(x, dtype)
        rows = np.asarray(quantize(x, dtype, tile=(1, -1)).scale)[:, 0]
        assert np.isnan(whole.scale).all()
        assert np.isnan(whole.dequantize()).all()
        assert np.flatnonzero(np.isnan(rows)).tolist() == [at // 128]


def test_a_block_whose_span_overflows_has_a_finite_scale():
    q = quantize(jnp.asarray([[3e38, -3e38, 1.0]]), jnp.uint4)
    assert np.isfinite(q.scale).all()
    assert np.isfinite(q.dequantize()).all()


@pytest.mark.parametrize("dtype", [jnp.int16, jnp.int32, jnp.uint32])
def test_integers_are_dequantized_in_float32(dtype):
    x = jnp.full((64, 64), 5.0)
    for q in (quantize(x, jnp.int8), pack(quantize(x, jnp.int8))):
        np.testing.assert_array_equal(q.dequantize(dtype), np.full((64, 64), 5))


@pytest.mark.skipif(jax.__version_info__ < (0, 8, 2), reason="XLA writes beyond such results")
@pytest.mark.parametrize("qtype", [jnp.int4, jnp.uint4])
def test_transposed_values_of_4_bits_beside_other_results(normal, qtype):
    w = normal(256, 512)
    q = quantize(w, qtype, tile=(32, 1))
    expected = np.asarray(q.dequantize()).T
    functions = (
        (lambda q: (q.mT, q.dequantize()), q),
        (lambda q: (q.T, q), q),
        (lambda w: (quantize(w, qtype, tile=(32, 1)).mT, w), w),
        (lambda p: (unpack(p).mT, unpack(p)), pack(q)),
    )
    for f, argument in functions:
        for _ in range(3):
            np.testing.assert_array_equal(jax.jit(f)(argument)[0].dequantize(), expected)
