"""Functions of products with packed weights: values, transformations, devices, custom calls."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from native_calls import calls_of
from packed_values import BF16, drawn, weight, wide

from jax_tcgemm import _core, _extension, gated_gemm, gated_mlp, gemm, mlp, pack, quantize
from jax_tcgemm.kernels import packed as kernels

pytestmark = pytest.mark.any_jax

F32 = jnp.float32


def weights(rng, count, shape=(64, 48), qtype="int4", **options):
    made = [weight(rng, qtype, shape, 32, **options) for _ in range(count)]
    return [pack(q) for q in made], [np.asarray(wide(q.dequantize(BF16))) for q in made]


def near(got, wanted):
    wanted = np.asarray(wanted, np.float64)
    tolerance = 4 * float(jnp.finfo(got.dtype).eps)
    np.testing.assert_allclose(wide(got), wanted, rtol=tolerance, atol=1e-3 * np.abs(wanted).max())


@pytest.mark.parametrize("shape", [(5,), (2, 3)], ids=str)
def test_values(rng, shape):
    (p, u), (w, v) = weights(rng, 2)
    x, r = drawn(rng, *shape, 64), drawn(rng, *shape, 48)
    bias, scale = drawn(rng, 48), drawn(rng, *shape, dtype=F32)
    z, y = wide(x) @ w, wide(x) @ v
    for f in (gemm, jax.jit(gemm, static_argnames="activation")):
        near(f(x, p, residual=r, bias=bias), z + wide(bias) + wide(r))
        near(f(x, p, activation="relu", row_scale=scale), np.maximum(z * wide(scale)[..., None], 0))
    near(gated_gemm(x, p, u, activation="relu"), np.maximum(z, 0) * y)
    near(gated_gemm(x, p, u, activation=None, bias_gate=bias), (z + wide(bias)) * y)
    got = gemm(
        x, p, epilogue=lambda z, b: {"sin": jnp.sin(z) + b, "z": z}, epilogue_operands=[bias]
    )
    assert got["sin"].dtype == F32
    near(got["sin"], np.sin(z) + wide(bias))
    near(got["z"], z)
    first, second = gated_gemm(
        x, p, u, epilogue=lambda g, u: (g - u, g.sum(0)), preferred_element_type=BF16
    )
    assert first.dtype == BF16
    near(first, z - y)
    near(second, z.sum(0))


def test_results_without_a_derivative(rng):
    (p,), (w,) = weights(rng, 1)
    x, t = drawn(rng, 5, 64), drawn(rng, 5, 64)
    integers = gemm(x, p, epilogue=lambda z: (z > 0).astype(jnp.int32))
    assert integers.dtype == jnp.int32
    result = jax.jvp(lambda x: gemm(x, p, epilogue=lambda z: ((z > 0), z)), (x,), (t,))
    assert result[1][0].dtype == jax.dtypes.float0
    near(result[1][1], wide(t) @ w)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_divided_by_columns(rng, kind):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,))
    q = weight(rng, "int4", (64, 128), 32)
    x, r = drawn(rng, 4, 64), drawn(rng, 4, 128)
    with jax.set_mesh(mesh):
        x_, p = (
            jax.device_put(y, NamedSharding(mesh, s)) for y, s in ((x, P()), (pack(q), P("x")))
        )
        r_ = jax.device_put(r, NamedSharding(mesh, P(None, "x")))
        y = jax.jit(lambda x, p, r: gemm(x, p, residual=r, activation="relu"))(x_, p, r_)
        assert y.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "x")), 2)
    near(y, np.maximum(wide(x) @ wide(q.dequantize(BF16)), 0) + wide(r))


EPILOGUES = {
    "relu": lambda x, p, u: gemm(x, p, activation="relu"),
    "silu": lambda x, p, u: gemm(x, p, activation="silu", alpha=2.0),
    "gated": gated_gemm,
    "a constant": lambda x, p, u: gemm(
        x, p, epilogue=lambda z: jnp.where(z > 0, 2 * z, jnp.sin(z))
    ),
}


@pytest.mark.parametrize("name", EPILOGUES)
def test_gradients_in_and_around_shard_map(rng, name):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    (p, u), _ = weights(rng, 2)
    x, function = drawn(rng, 4, 64), EPILOGUES[name]

    def loss(x, p, u):
        return (function(x, p, u).astype(F32) ** 2).sum()

    specs = {"mesh": mesh, "in_specs": (P("x"), P(), P()), "out_specs": P("x")}
    inside = jax.shard_map(jax.grad(loss), **specs)
    mapped = jax.shard_map(function, **specs)
    around = jax.grad(lambda x, p, u: (mapped(x, p, u).astype(F32) ** 2).sum())
    wanted = wide(jax.grad(loss)(x, p, u))
    for got in (inside(x, p, u), jax.jit(around)(x, p, u)):
        np.testing.assert_allclose(wide(got), wanted, atol=2e-2 * np.abs(wanted).max())
    tangent = jax.jvp(lambda x: mapped(x, p, u), (x,), (x,))[1]
    expected = jax.jvp(lambda x: function(x, p, u), (x,), (x,))[1]
    np.testing.assert_allclose(wide(tangent), wide(expected), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", EPILOGUES)
def test_vmap_over_an_explicitly_sharded_axis(rng, name):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    (p, u), _ = weights(rng, 2)
    x, function = drawn(rng, 4, 3, 64), EPILOGUES[name]
    expected = jax.vmap(function, (0, None, None))(x, p, u)
    with jax.set_mesh(mesh):
        whole = NamedSharding(mesh, P())
        q, v = (jax.device_put(each, whole) for each in (p, u))
        mapped = jax.vmap(function, (0, None, None))
        y = jax.jit(mapped)(jax.device_put(x, NamedSharding(mesh, P("x"))), q, v)
        assert jax.typeof(y).sharding.spec[0] == "x"
    np.testing.assert_allclose(wide(y), wide(expected), rtol=0.02, atol=0.02)


# Custom calls

CALLS = {
    "residual": (lambda x, p, u, r: gemm(x, p, residual=r), 1),
    "gelu of a bias": (lambda x, p, u, r: gemm(x, p, bias=r[0, 0], activation="gelu"), 1),
    "gated": (lambda x, p, u, r: gated_gemm(x, p, u), 2),
    "mapped rows": (
        lambda x, p, u, r: jax.vmap(lambda x, y: gemm(x, p, residual=y, bias=r[0, 0]))(x, r),
        1,
    ),
    "a vector each": (
        lambda x, p, u, r: jax.vmap(lambda x, y: gemm(x[None], p, residual=y[None])[0])(
            x.reshape(6, 256), r.reshape(6, 64)
        ),
        1,
    ),
    "two results": (lambda x, p, u, r: gemm(x, p, epilogue=lambda z: (z, jnp.sin(z))), 1),
}
XLAS = {
    "a reduction": (lambda x, p, u, r: gemm(x, p, epilogue=lambda z: z.sum(-1, keepdims=True)),),
    "many rows": (lambda x, p, u, r: gemm(jnp.repeat(x, 200, 1), p, activation="relu"),),
    "both weights in one": (lambda x, p, u, r: gated_gemm(x, p),),
}


def targets_of(rng, function):
    if _extension.PACKED_FUNCTION_TARGET not in _core.registrations():
        pytest.skip("no kernels were built")
    (p, u), _ = weights(rng, 2, (256, 64))
    types = jax.tree.map(
        lambda y: jax.ShapeDtypeStruct(y.shape, y.dtype),
        (drawn(rng, 2, 3, 256), p, u, drawn(rng, 2, 3, 64)),
    )
    lowered = jax.jit(function).trace(*types).lower(lowering_platforms=("cuda",))
    return {name: attributes for name, attributes, *_ in calls_of(lowered.compiler_ir("stablehlo"))}


@pytest.mark.usefixtures("all_kernels")
@pytest.mark.parametrize("name", CALLS)
def test_one_kernel(rng, name):
    function, count = CALLS[name]
    found = targets_of(rng, function)
    assert list(found) == [_extension.PACKED_FUNCTION_TARGET]
    at = found[_extension.PACKED_FUNCTION_TARGET]
    assert {name: at[name] for name in ("m", "n", "k", "weights")} == {
        "m": 6,
        "n": 64,
        "k": 256,
        "weights": count,
    }
    choose = kernels.choose_pair if count == 2 else kernels.choose
    row = choose(4, 6, 64, 256, 32)
    assert {name: at[name] for name in dataclasses.asdict(row)} == dataclasses.asdict(row)


@pytest.mark.usefixtures("all_kernels")
@pytest.mark.parametrize("name", XLAS)
def test_functions_that_xla_computes(rng, name):
    assert _extension.PACKED_FUNCTION_TARGET not in targets_of(rng, *XLAS[name])


def test_pairs():
    for m in (1, 16, 20, 64, 300):
        for n in (64, 14336):
            row = kernels.choose_pair(4, m, n, 4096, 128)
            assert row is not None
            assert row.row_blocks % 2 == 0
            assert 32 * (4 * row.row_blocks + 2) * row.blocks_on_sm <= 2048
    assert kernels.choose_pair(4, kernels.MOST_ROWS + 1, 64, 4096, 128) is None


@pytest.mark.parametrize("packed", [False, True])
def test_layers_round_what_a_function_makes(normal, packed):
    x = normal(16, 128).astype(BF16)
    made = [quantize(normal(*shape), jnp.int8, tile=(-1, 1)) for shape in ((128, 256), (256, 64))]
    up, down = map(pack, made) if packed else made
    bytes_of_both = jnp.ones((16, 128), jnp.int8), made[0].qvalue
    for y, dtype in (
        (mlp(x, up, None, down, epilogue=jnp.tanh), BF16),
        (mlp(x, up, None, made[1].dequantize(BF16), epilogue=jnp.tanh), BF16),
        (gated_mlp(x, up, up, down, epilogue=jnp.multiply), BF16),
        (gated_mlp(x, normal(128, 512), None, down, epilogue=jnp.multiply), F32),
        (mlp(*bytes_of_both, None, down, epilogue=lambda p: p * 1e-3), F32),
    ):
        assert y.dtype == dtype
