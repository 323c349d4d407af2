"""Quantized operands of ``gemm`` and ``dot_general`` without a GPU: accepted, refused, values."""

from __future__ import annotations

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from quantized_values import E4M3, E5M2, INT8, wide

import jax_tcgemm
from jax_tcgemm import dot_general, gated_gemm, gemm, quantize
from jax_tcgemm.kernels import names as kernel_names
from jax_tcgemm.lowering import dots
from jax_tcgemm.partitioning import partitioner, rules
from jax_tcgemm.primitives import gemm as gemm_primitive
from jax_tcgemm.problem.arithmetic import resolve_run_time
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Operands

pytestmark = pytest.mark.any_jax

ROW = "sm90_e4m3e4m3_fast_128x128x128_s6_c2x1_pingpong"


def drawn(shape, dtype=E4M3):
    x = np.random.default_rng().normal(size=shape)
    return jnp.asarray(np.round(30 * x) if dtype == INT8 else x, jnp.float32).astype(dtype)


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("pair", [(E4M3, E4M3), (E5M2, E4M3), (INT8, INT8)])
def test_the_whole_formula(pair, layout):
    m, n, k = 24, 40, 64
    a, b = drawn((m, k), pair[0]), drawn((k, n), pair[1])
    rng = np.random.default_rng()
    of_a, of_b = (rng.uniform(0.01, 0.05, s).astype(np.float32) for s in ((m, 1), (1, n)))
    c, bias, residual = (rng.normal(size=s).astype(np.float32) for s in ((m, n), n, (m, n)))
    y = gemm(
        a.T if layout[0] == "t" else a,
        b.T if layout[1] == "t" else b,
        c,
        bias=bias,
        alpha=0.5,
        beta=2.0,
        activation="relu",
        residual=residual,
        a_scale=of_a.T if layout[0] == "t" else of_a,
        b_scale=of_b.T if layout[1] == "t" else of_b,
        transpose_a=layout[0] == "t",
        transpose_b=layout[1] == "t",
        preferred_element_type=jnp.float32,
    )
    product = (wide(a) * of_a) @ (wide(b) * of_b)
    expected = np.maximum(0.5 * product + 2 * c + bias, 0) + residual
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_types_of_results():
    a, b = drawn((8, 16)), drawn((16, 8), E5M2)
    assert gemm(a, a, transpose_b=True).dtype == E4M3
    assert gemm(a, a, transpose_b=True, a_scale=2.0).dtype == jnp.bfloat16
    assert gemm(a, b, preferred_element_type=jnp.float16).dtype == jnp.float16
    i = drawn((8, 16), INT8)
    assert gemm(i, i, transpose_b=True).dtype == INT8
    y = gemm(i, i, transpose_b=True, preferred_element_type=jnp.int32)
    np.testing.assert_array_equal(y, wide(i) @ wide(i).T)


def test_a_quantized_result_is_divided_and_clipped():
    a = jnp.eye(8, dtype=jnp.float32).astype(INT8)
    b = jnp.arange(-32, 32).reshape(8, 8).astype(INT8)
    options = {"a_scale": 1.0, "out_scale": 0.2, "return_amax": True}
    q, amax = gemm(a, b, preferred_element_type=INT8, **options)
    expected = np.clip(np.round(np.float32(wide(b)) / np.float32(0.2)), -128, 127)
    np.testing.assert_array_equal(q, expected)
    assert float(amax) == 32
    q = gemm(a, b, out_scale=1e-3, preferred_element_type=E4M3)
    assert float(jnp.abs(q.astype(jnp.float32)).max()) == 448


@pytest.mark.parametrize("shape", [(0, 8), (8, 0)])
def test_the_largest_value_of_nothing(shape):
    d, amax = gemm(drawn((shape[0], 4)), drawn((4, shape[1])), a_scale=1.0, return_amax=True)
    assert (d.shape, float(amax)) == (shape, 0.0)


def test_long_sums_of_integers_do_not_wrap_in_a_float():
    k = 140000
    a = jnp.full((1, k), 127, INT8)
    exact = 127.0**2 * k
    for y in (
        gemm(a, a, transpose_b=True, preferred_element_type=jnp.float32),
        gemm(a, a, transpose_b=True, a_scale=1.0, preferred_element_type=jnp.float32),
    ):
        # The largest error of float32 sums of k terms, in any order; wrapping would be off by
        # 2**32.
        assert abs(float(y[0, 0]) - exact) <= k * 2.0**-24 * exact < 2.0**31


def test_a_config_of_a_row_that_is_compiled_at_run_time():
    a = drawn((8, 16))
    plain = gemm(a, a, transpose_b=True, a_scale=1.0)
    np.testing.assert_array_equal(gemm(a, a, transpose_b=True, a_scale=1), plain)
    np.testing.assert_array_equal(gemm(a, a, transpose_b=True, a_scale=1.0, config=ROW), plain)
    bias = jnp.ones((3, 8))
    many = jax.vmap(lambda x: gemm(a, a, transpose_b=True, a_scale=1.0, bias=x, config=ROW))(bias)
    assert many.shape == (3, 8, 8)
    with pytest.raises(ValueError, match="is no kernel configuration in E4M3_E4M3_F32_FAST"):
        gemm(a, a, transpose_b=True, a_scale=1.0, config="sm90_s8_64x64x128_s6_c1x1_cooperative")
    assert kernel_names.by_name(ROW).arithmetic.at_run_time


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"a_scale": jnp.ones((3, 1))}, ValueError, "does not fit a.shape"),
        ({"a_scale": jnp.ones((8, 1), jnp.int32)}, TypeError, "must be floating-point"),
        ({"out_scale": 1.0}, TypeError, "is not the type|8 bits"),
        ({"out_scale": 1.0, "preferred_element_type": jnp.float32}, ValueError, "8-bit result"),
        ({"a_scale": 1.0, "preferred_element_type": jnp.int32}, TypeError, "is not the type"),
        ({"a_scale": 1.0, "preferred_element_type": jnp.bool_}, TypeError, "is not the type"),
        ({"a_scale": 1.0, "precision": "F64_F64_F64"}, TypeError, "precision"),
        ({"a_scale": 1.0, "out_sharding": P("x")}, ValueError, "out_sharding"),
        ({"a_scale": 1.0, "epilogue": jnp.abs, "bias": jnp.ones(8)}, ValueError, "bias"),
        ({"conjugate_a": "no"}, TypeError, "conjugate_a"),
    ],
)
def test_what_is_refused(options, error, message):
    a = drawn((8, 16), INT8 if options == {"out_scale": 1.0} else E4M3)
    if options == {"out_scale": 1.0}:
        options = {**options, "preferred_element_type": jnp.int32}
        error, message = ValueError, "8-bit result"
    with pytest.raises(error, match=message):
        gemm(a, a, transpose_b=True, **options)
    with pytest.raises(TypeError, match="8-bit operands alone take"):
        gemm(jnp.ones((8, 8)), jnp.ones((8, 8)), a_scale=1.0)


def test_results_of_integers_are_those_of_matmul():
    a = drawn((8, 16))
    for dtype in (jnp.int32, INT8):
        y = gemm(a, a, transpose_b=True, preferred_element_type=dtype)
        np.testing.assert_array_equal(y, jnp.matmul(a, a.T, preferred_element_type=dtype))


def test_scales_by_blocks_have_no_derivative_but_what_follows_has():
    a, b = drawn((8, 128)), drawn((128, 128))
    of_a, of_b = jnp.ones((8, 1)), jnp.ones((1, 1))

    def loss(a, bias):
        y = gemm(a, b, a_scale=jnp.ones((8, 128 // 64)), b_scale=of_b, bias=bias)
        return y.astype(jnp.float32).sum()

    assert jax.grad(loss, 1)(a, jnp.ones(128)).tolist() == [8.0] * 128
    a, b = drawn((8, 256)), drawn((256, 128))

    def by_blocks(a, bias):
        y = gemm(a, b, a_scale=jnp.ones((8, 2)), b_scale=jnp.ones((2, 1)), bias=bias)
        return y.astype(jnp.float32).sum()

    assert jax.grad(by_blocks, 1)(a, jnp.ones(128)).tolist() == [8.0] * 128
    with pytest.raises(TypeError, match="fp8_dot"):
        jax.grad(by_blocks)(a, jnp.ones(128))
    assert of_a.shape == (8, 1)


@pytest.mark.parametrize("types", [(E4M3, E4M3), (E4M3, E5M2)])
def test_dot_general_and_its_gradients_are_those_of_lax(types):
    a, b = drawn((3, 8, 16), types[0]), drawn((16, 24), types[1])
    dims = (((2,), (0,)), ((), ()))

    def loss(dot, a, b):
        return jnp.sum(dot(a, b, dims, preferred_element_type=jnp.float32) ** 2)

    for i in (0, 1):
        ours, theirs = (jax.grad(loss, i + 1)(f, a, b) for f in (dot_general, jax.lax.dot_general))
        assert ours.dtype == theirs.dtype == types[i]
        np.testing.assert_array_equal(wide(ours), wide(theirs))


def test_quantized_operands_of_dot_general_refuse_what_is_not_theirs():
    q = quantize(jnp.ones((16, 8)), E4M3)
    with pytest.raises(TypeError, match="out_sharding"):
        dot_general(jnp.ones((4, 16)), q, (((1,), (0,)), ((), ())), out_sharding=P("x"))


def test_two_weights_of_integers_with_a_function():
    x, w = drawn((8, 16), INT8), drawn((16, 8), INT8)
    y = gated_gemm(x, w, w, epilogue=lambda g, u: g - u, preferred_element_type=jnp.int32)
    assert not y.any()


@pytest.mark.parametrize("k", [70, 1024, 5000])
@pytest.mark.parametrize("most_waiting", [2**28, 0])
def test_integers_by_bfloat16_are_exact(monkeypatch, k, most_waiting):
    monkeypatch.setattr(dots, "_MOST_WAITING", most_waiting)
    rng = np.random.default_rng(k)
    a, b = (rng.choice([-128, -128, 127, 5], shape).astype(np.int8) for shape in ((9, k), (k, 7)))
    by_rows = dots._dot_of_int8(a, b, (((1,), (0,)), ((), ())))
    np.testing.assert_array_equal(by_rows, a.astype(np.int64) @ b.astype(np.int64))
    batches = np.stack([a, -a // 2]), np.stack([b, b]).swapaxes(1, 2)
    batched = dots._dot_of_int8(*batches, (((2,), (2,)), ((0,), (0,))))
    wide = [x.astype(np.int64) for x in batches]
    np.testing.assert_array_equal(batched, np.einsum("bmk,bnk->bmn", *wide))


@pytest.mark.parametrize("dtype", [INT8, E4M3], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize(
    ("of_a", "of_b"), [(P("x"), P(None, "y")), (P("x", "y"), P("y")), (P(None, "x"), P("x"))]
)
def test_products_are_divided_like_others(monkeypatch, all_kernels, dtype, of_a, of_b):
    monkeypatch.setenv(rules.SETTING, "everywhere")
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("x", "y"), auto, devices=jax.devices("cpu")[:4])
    rng = np.random.default_rng(0)
    a, b = (
        jnp.asarray(np.round(rng.normal(size=shape) * 30)).astype(dtype)
        for shape in ((512, 256), (256, 384))
    )
    scale = jnp.asarray(rng.uniform(0.5, 2, (1, 384)), jnp.float32)

    def f(a, b):
        options = {"preferred_element_type": jnp.float32, "precision": "highest"}
        return gemm(a, b, b_scale=scale, activation="gelu", **options)

    wanted = jax.jit(f)(a, b)
    placed = [
        jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
        for x, spec in ((a, of_a), (b, of_b))
    ]
    np.testing.assert_array_equal(jax.jit(lambda a, b: f(a, b))(*placed), wanted)
    lowered = jax.jit(f).trace(*placed).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count(f"custom_call @{partitioner.TARGET}") == 1
    assert "stablehlo.dot_general" not in lowered


@pytest.mark.parametrize("dtype", [INT8, E4M3], ids=lambda dtype: dtype.__name__)
def test_the_product_alone_has_a_kernel(all_kernels, dtype):
    """A device's part of a product is like this: the scales follow the sum."""
    x = jax.ShapeDtypeStruct((128, 128), dtype)
    out = jnp.dtype(jnp.int32 if dtype == INT8 else jnp.float32)
    spec = GemmSpec(Operands(a=(0, 1), b=(0, 1)), out, (jax.lax.Precision.HIGHEST,) * 2)
    traced = jax.jit(lambda a, b: gemm_primitive.bind(Operands(a, b), spec)).trace(x, x)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "jax_tcgemm_compiled_gemm" in text
    assert "stablehlo.dot_general" not in text


def test_integers_of_symbolic_shape_are_exported():
    m, k = jax.export.symbolic_shape("m,4096")
    a = jax.ShapeDtypeStruct((m, k), jnp.int8)
    b = jax.ShapeDtypeStruct((4096, 32), jnp.int8)
    product = jax.jit(lambda a, b: gemm(a, b, preferred_element_type=jnp.int32))
    checks = jax_tcgemm.export_disabled_checks()
    exported = jax.export.export(product, disabled_checks=checks)(a, b)
    assert exported.out_avals[0].shape[1] == 32


@pytest.mark.parametrize("epilogue", [None, lambda z: z])
def test_long_sums_of_int32_wrap_around(epilogue):
    x = jnp.full((1, 140_000), 11, jnp.int8).at[0, 0].set(10)
    most = jnp.full((1, 140_000), 127, jnp.int8)
    for a in (x, most):
        expected = np.square(np.asarray(a).astype(np.int64)).sum().astype(np.int32)
        z = gemm(a, a.T, preferred_element_type=jnp.int32, epilogue=epilogue)
        assert z.dtype == jnp.int32
        assert z[0, 0] == expected


def test_no_integers_are_given_to_xla_on_gpus(cuda_module):
    x = jax.ShapeDtypeStruct((64, 64), jnp.int8)
    text, _ = cuda_module(lambda a, b: gemm(a, b, config="xla"), x, x)
    assert "stablehlo.dot_general" in text
    assert "xi8>, tensor<64x64xi8>) -> tensor<64x64xi32>" not in text


def test_arithmetic_of_8_bits():
    f32, default = jnp.dtype(jnp.float32), (jax.lax.Precision.DEFAULT,) * 2
    highest = (jax.lax.Precision.HIGHEST,) * 2
    e4m3, e5m2, s8 = map(jnp.dtype, (E4M3, E5M2, INT8))
    assert resolve_run_time(e4m3, e5m2, f32, default) == "E4M3_E5M2_F32_FAST"
    assert resolve_run_time(e4m3, e5m2, f32, highest) == "E4M3_E5M2_F32"
    preset = jax.lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32
    assert resolve_run_time(e5m2, e5m2, f32, preset) == "E5M2_E5M2_F32"
    assert resolve_run_time(s8, s8, jnp.dtype(jnp.int32), default) == "S8_S8_S32"
    assert resolve_run_time(s8, s8, f32, default) is None
    assert resolve_run_time(e4m3, s8, f32, default) is None
    assert jax_tcgemm.gemm is gemm
