"""JAX's stricter settings and rarer types: what works with `jnp.matmul` works here."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_call import assert_trees_close, square_sum
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from sharded_checks import put
from sharded_program import mesh_of

import jax_tcgemm
from jax_tcgemm import (
    dot_general,
    gated_gemm,
    gated_mlp,
    gemm,
    mlp,
    pack,
    quantize,
    ragged_dot,
)
from jax_tcgemm.partitioning.partitioner import TARGET

FLOAT8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)
SIZES = jnp.array([3, 1])


def wide_mlp(x, w):
    return mlp(x, w, None, w.T, preferred_element_type=jnp.float32)


def wide_ragged(x, w):
    bias = jnp.ones((2, w.shape[1]), jnp.float32)
    return ragged_dot(x, jnp.stack([w, w]), SIZES, bias=bias, preferred_element_type=jnp.float32)


def wide_dot(x, w):
    return dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def wide(function):
    return lambda *args: function(*args, preferred_element_type=jnp.float32)


@pytest.mark.parametrize(
    "function",
    [wide(gemm), lambda x, w: wide(gated_gemm)(x, w, w), wide_mlp, wide_ragged, wide_dot],
    ids=["gemm", "gated_gemm", "mlp", "ragged_dot", "dot_general"],
)
def test_strict_promotion(normal, function):
    x, w = normal(4, 6, dtype=jnp.bfloat16), normal(6, 8, dtype=jnp.bfloat16)
    value_and_grads = jax.value_and_grad(square_sum(function), (0, 1))
    expected = value_and_grads(x, w)
    with jax.numpy_dtype_promotion("strict"):
        actual = value_and_grads(x, w)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_strict_promotion_takes_what_matmul_takes(normal):
    x, w = normal(4, 6, dtype=jnp.bfloat16), normal(6, 8)
    with jax.numpy_dtype_promotion("strict"):
        with pytest.raises(ValueError, match="dtype"):
            jnp.matmul(x, w)
        with pytest.raises(TypeError, match=r"a\.dtype=bfloat16, b\.dtype=float32"):
            gemm(x, w)


def test_master_weights_under_strict_promotion(normal):
    x, w1, w2 = normal(4, 6, dtype=jnp.bfloat16), normal(6, 8), normal(8, 3)
    options = {"precision": "BF16_BF16_F32", "preferred_element_type": jnp.bfloat16}

    def plain(x, w1, w2):
        return mlp(x, w1, None, w2, **options).astype(jnp.float32)

    def gated(x, w1, w2):
        return gated_mlp(x, w1, w1, w2, **options).astype(jnp.float32)

    for function in (plain, gated):
        value_and_grads = jax.value_and_grad(square_sum(function), (0, 1, 2))
        expected = value_and_grads(x, w1, w2)
        with jax.numpy_dtype_promotion("strict"):
            actual = value_and_grads(x, w1, w2)
        jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_rank_promotion(normal):
    x, w, rhs = normal(4, 6), normal(6, 8), normal(2, 6, 8)

    def f(x, w, rhs, c, residual, bias):
        y = gemm(x, w, c, residual=residual, bias=residual, activation="gelu")
        return y, ragged_dot(x, rhs, SIZES, bias=bias, activation="silu")

    args = (x, w, rhs, normal(4, 8), normal(8), normal(2, 8))
    expected = f(*args)
    with jax.numpy_rank_promotion("raise"):
        assert_trees_close(f(*args), expected)
        jax.grad(lambda *args: sum(y.sum() for y in f(*args)), range(6))(*args)
        jax.jvp(f, args, args)


def test_rank_promotion_of_quantized_operands(normal):
    x, w, r = normal(4, 8), normal(8, 8), normal(8)
    a, b = quantize(x, jnp.int8, tile=(1, -1)), quantize(w, jnp.int8, tile=(-1, 1))
    packed = pack(quantize(w, jnp.int4, tile=(8, 1)))
    scales = {"a_scale": a.scale, "b_scale": b.scale}
    calls = (
        lambda: gemm(a.qvalue, b.qvalue, r, residual=r, bias=r, **scales),
        lambda: gemm(a.qvalue[None], b.qvalue, bias=r, b_scale=b.scale),
        lambda: gemm(x, packed, residual=r, bias=r),
        lambda: gemm(x[None], packed, bias=r),
    )
    for call in calls:
        expected = call()
        with jax.numpy_rank_promotion("raise"):
            np.testing.assert_array_equal(call(), expected)


def test_rank_promotion_of_tangents(normal):
    x, w, b = normal(4, 6), normal(6, 8), normal(8)
    for f in (
        lambda x, w, b: gemm(x, w, bias=b, activation="gelu"),
        lambda x, w, b: gemm(x[None], w, bias=b, row_scale=x[:, 0], activation="gelu"),
        lambda x, w, b: gated_gemm(x, w, w, bias_gate=b, bias_up=b),
        lambda x, w, b: mlp(x, w, b, w.T, b[:6]),
        lambda x, w, b: gated_mlp(x, w, w, w.T, bias_gate=b, bias_up=b, bias_down=b[:6]),
    ):
        expected = jax.jvp(f, (x, w, b), (x, w, b))
        with jax.numpy_rank_promotion("raise"):
            assert_trees_close(jax.jvp(f, (x, w, b), (x, w, b)), expected)
            jax.hessian(lambda b, f=f: f(x, w, b).sum())(b)


@pytest.mark.parametrize("b_dtype", FLOAT8)
def test_float8(normal, b_dtype):
    a, b = normal(16, 32, dtype=FLOAT8[0]), normal(32, 16, dtype=b_dtype)
    got = wide(gemm)(a, b)
    expected = wide(jnp.matmul)(a, b)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    actual = jax.grad(square_sum(wide(gemm)), (0, 1))(a, b)
    assert [g.dtype for g in actual] == [a.dtype, b.dtype]
    exact = jax.grad(square_sum(jnp.matmul), (0, 1))(*(x.astype(jnp.float32) for x in (a, b)))
    for gradient, value in zip(actual, exact, strict=True):
        eps = float(jnp.finfo(gradient.dtype).eps)
        limit = float(jnp.finfo(gradient.dtype).max)
        np.testing.assert_allclose(
            np.float32(gradient), np.clip(value, -limit, limit), rtol=eps, atol=eps
        )


@pytest.mark.parametrize(
    "function",
    [gemm, lambda x, w: gated_gemm(x, w, w, activation=None), lambda x, w: gemm(w.T, x.T)],
)
def test_real_operands_of_complex_products_have_real_gradients(normal, function):
    x, w = normal(4, 6), normal(6, 8, dtype=jnp.complex64)

    def loss(f, x):
        return jnp.sum(jnp.abs(f(x, w)))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = jax.grad(loss, 1)(function, x)
    expected = jax.grad(loss, 1)(lambda x, w: function(x + 0j, w), x)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("mode", "value"), [(jax.debug_nans, jnp.nan), (jax.debug_infs, jnp.inf)], ids=["nans", "infs"]
)
@pytest.mark.parametrize(
    "function",
    [
        jnp.matmul,
        gemm,
        lambda x, w: gemm(x, w, activation="relu"),
        lambda x, w: gated_gemm(x, w, w),
        lambda x, w: mlp(x, w, None, w.T),
        lambda x, w: ragged_dot(x, jnp.stack([w, w]), SIZES),
        lambda x, w: dot_general(x, w, (((1,), (0,)), ((), ()))),
    ],
    ids=["matmul", "gemm", "activation", "gated_gemm", "mlp", "ragged_dot", "dot_general"],
)
def test_debugging_finds_what_is_not_finite(normal, mode, value, function):
    x, w = normal(4, 6).at[0].set(value), jnp.abs(normal(6, 8))
    with mode(True):
        for f in (function, jax.jit(function), jax.grad(square_sum(function))):
            with pytest.raises(FloatingPointError):
                f(x, w)
        function(jnp.ones_like(x), w)


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (lambda x, w, b, c: gemm(x, w, c, bias=b), "xwbc"),
        (lambda x, w, b, c: gemm(x, w, residual=c, activation="gelu"), "xwc"),
        (lambda x, w, b, c: gated_gemm(x, w, w, bias_up=b), "xwb"),
        (lambda x, w, b, c: ragged_dot(x, jnp.stack([w, w]), SIZES, bias=b), "xb"),
        (lambda x, w, b, c: dot_general(x, w, (((1,), (0,)), ((), ()))), "xw"),
    ],
    ids=["gemm", "residual", "gated_gemm", "ragged_dot", "dot_general"],
)
def test_operands_in_host_memory_are_refused(normal, function, names):
    """Like `jnp`, tracing refuses them beside other operands in device memory."""
    values = {"x": normal(4, 6), "w": normal(6, 8), "b": normal(8), "c": normal(4, 8)}
    for name in names:
        moved = {name: jax.device_put(values[name], jax.memory.Space.Host)}
        with pytest.raises(ValueError, match=r"memory.space"):
            jax.eval_shape(function, *(values | moved).values())


# Meshes with explicit axes


@pytest.fixture
def mesh():
    return mesh_of((2, 2), AxisType.Explicit)


@pytest.mark.parametrize("platform", ["cuda", "cpu"])
def test_operands_are_widened_for_the_platform_lowered_for(normal, mesh, platform):
    """XLA's CPU compiler needs float32 products, which would be many times slower on a GPU."""
    x = put(mesh, normal(8, 6, dtype=jnp.bfloat16), "x", None)
    w = put(mesh, normal(6, 4, dtype=jnp.bfloat16), None, None)

    def functions(x, w):
        return gemm(x, w), gated_gemm(x, w, w), mlp(x, w, None, w.T)

    with jax.set_mesh(mesh):
        lowered = jax.jit(functions).trace(x, w).lower(lowering_platforms=(platform,))
    name, count = {"cpu": ("dot_general", 5), "cuda": (f"custom_call @{TARGET}", 4)}[platform]
    products = [line for line in lowered.as_text().splitlines() if name in line]
    operands = [line.rsplit(" : ", 1)[1].split("->")[0] for line in products]
    assert len(operands) == count
    assert all(("bf16" in types) == (platform == "cuda") for types in operands), operands
    assert all(("f32" in types) == (platform == "cpu") for types in operands), operands


@pytest.mark.parametrize("axis", [None, "y"])
@pytest.mark.parametrize(
    ("ours", "formula"),
    [
        (lambda x, w, v, b, r: mlp(x, w, None, v, b, residual=r), jax.nn.gelu),
        (
            lambda x, w, v, b, r: gated_mlp(x, w, w, v, bias_down=b, residual=r),
            lambda z: jax.nn.silu(z) * z,
        ),
    ],
    ids=["mlp", "gated_mlp"],
)
def test_explicitly_sharded_addends_of_layers(normal, mesh, ours, formula, axis):
    """Differentiates only by the addends of the second product."""
    x, w = put(mesh, normal(8, 6), "x", None), put(mesh, normal(6, 4), None, None)
    v = put(mesh, normal(4, 6), None, "y")
    addends = put(mesh, normal(6), axis), put(mesh, normal(8, 6), None, axis)

    def derivatives(f, i):
        def of_one(addend):
            given = [*addends[:i], addend, *addends[i + 1 :]]
            return f(x, w, v, *given)

        forward = jax.jit(lambda t: jax.jvp(of_one, (t,), (t,)))(addends[i])
        results = forward, jax.jit(jax.grad(square_sum(of_one)))(addends[i])
        return results, jax.tree.map(lambda y: jax.typeof(y).sharding.spec, results)

    with jax.set_mesh(mesh):
        for i in range(2):
            actual, shardings = derivatives(ours, i)
            expected, wanted = derivatives(lambda x, w, v, b, r: formula(x @ w) @ v + b + r, i)
            (primal, _), gradient = wanted  # older JAX does not shard its own tangents like primals
            assert shardings == ((primal, primal), gradient)
            assert_trees_close(actual, expected, 1e-3)


def test_reduced_types(normal, mesh):
    """Gradients of replicated operands are summed over mesh axes where they are used."""
    w = normal(8, 6)
    x = put(mesh, normal(6, 4), None, "y")
    spec = PartitionSpec(None, None, reduced={"x"})

    reshard = jax.reshard if hasattr(jax, "reshard") else jax.sharding.reshard  # before 0.9

    def of_weight(function):
        return lambda w: function(reshard(w, spec), x).sum()

    with jax.set_mesh(mesh):
        w = jax.device_put(w, NamedSharding(mesh, PartitionSpec(None, None)))
        expected = jax.jit(of_weight(jnp.matmul))(w)
        np.testing.assert_allclose(jax.jit(of_weight(gemm))(w), expected, rtol=1e-5)


# Policies


def test_results_have_names_before_and_after_the_activation(normal, count_gemms):
    x, w, v = normal(4, 6), normal(6, 8), normal(8, 3)

    def grads(*names):
        policy = jax.checkpoint_policies.save_only_these_names(*names)

        def f(x, w, v):
            return gemm(gemm(x, w, activation="gelu"), v, activation="tanh")

        return jax.grad(square_sum(jax.checkpoint(f, policy=policy)), (0, 1, 2))

    both = jax_tcgemm.PREACTIVATION, jax_tcgemm.ACTIVATION
    assert count_gemms(grads(*both), x, w, v) == 6
    assert count_gemms(grads(), x, w, v) == 8
