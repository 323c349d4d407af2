"""Products with packed weights that are divided among devices along n, k or the batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from packed_values import weight

from jax_tcgemm import gemm, pack
from jax_tcgemm.partitioning import rules

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter", "collective-permute")


def mesh_of(count, kind=AxisType.Auto):
    shape, names = ((2,), ("x",)) if count == 2 else ((4, 2), ("x", "y"))
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))


def put(x, mesh, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))


def check(got, x, q, dtype=jnp.bfloat16):
    x, w = np.asarray(x, np.float64), np.asarray(q.dequantize(dtype), np.float64)
    assert got.shape == (*x.shape[:-1], w.shape[-1])
    error = np.abs(np.asarray(got, np.float64) - x @ w)
    assert np.all(error <= 2**-7 * (np.abs(x) @ np.abs(w)))


@pytest.mark.parametrize("setting", ["everywhere", "never"])
@pytest.mark.parametrize(
    ("count", "w_spec", "x_spec", "y_spec", "sums"),
    [
        (2, P("x"), P(), P(None, "x"), 0),
        (2, P(None, "x"), P(None, "x"), P(), 1),
        (8, P("x"), P("y"), P("y", "x"), 0),
        (8, P("x", "y"), P(None, "y"), P(None, "x"), 1),
    ],
    ids=str,
)
def test_no_weight_travels(rng, monkeypatch, setting, count, w_spec, x_spec, y_spec, sums):
    """Checks results, shardings and collectives, by the rule here and by XLA's partitioner."""
    monkeypatch.setenv(rules.SETTING, setting)
    mesh = mesh_of(count)
    has_zeros = bool(rng.integers(2))
    q = weight(rng, "int4", (512, 256), int(rng.choice([32, 64, 128])), has_zeros=has_zeros)
    x = jnp.asarray(rng.normal(size=(8, 512)), jnp.bfloat16)
    operands = put(x, mesh, x_spec), put(pack(q), mesh, w_spec)
    program = jax.jit(lambda x, w: gemm(x, w)).lower(*operands).compile()
    y = program(*operands)
    check(y, x, q)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, y_spec), 2)
    text = program.as_text()
    assert {name: text.count(f" {name}(") for name in COLLECTIVES} == {
        name: sums if name == "all-reduce" else 0 for name in COLLECTIVES
    }


def test_whole_columns_and_uneven_extents(rng, monkeypatch):
    monkeypatch.setenv(rules.SETTING, "everywhere")
    mesh = mesh_of(2)
    for qtype, k, n, group, spec in (
        ("int8", 128, 128, 128, P(None, "x")),
        ("int8", 128, 70, 128, P("x")),
        ("int4", 384, 64, 128, P(None, "x")),  # three groups on two devices
        ("uint4", 192, 64, 48, P(None, None)),
    ):
        q = weight(rng, qtype, (k, n), group, scale_dtype="float32")
        p = pack(q)
        whole = NamedSharding(mesh, P())
        values = NamedSharding(mesh, spec)
        p = type(p)(jax.device_put(p.values, values), jax.device_put(p.scales, whole), *p_meta(p))
        x = jnp.asarray(rng.normal(size=(3, k)), jnp.bfloat16)
        x_spec = P(None, "x") if spec == P(None, "x") else P()
        check(jax.jit(lambda x, w: gemm(x, w))(put(x, mesh, x_spec), p), x, q)


def p_meta(p):
    return p.matrix_shape, p.qtype, p.group, p.has_zeros, p.version


def test_batches(rng, monkeypatch):
    monkeypatch.setenv(rules.SETTING, "everywhere")
    mesh = mesh_of(8)
    q = weight(rng, "int4", (4, 128, 128), 64)
    x = jnp.asarray(rng.normal(size=(4, 5, 128)), jnp.bfloat16)
    w = put(pack(q), mesh, P("x", "y"))
    program = jax.jit(lambda x, w: gemm(x, w)).lower(put(x, mesh, P("x")), w).compile()
    y = program(put(x, mesh, P("x")), w)
    check(y, x, q)
    assert not any(f" {name}(" in program.as_text() for name in COLLECTIVES)


@pytest.mark.parametrize("along_k", [False, True])
def test_shard_map(rng, along_k):
    mesh = mesh_of(2)
    q = weight(rng, "uint4", (256, 128), 64, has_zeros=True)
    x = jnp.asarray(rng.normal(size=(3, 256)), jnp.bfloat16)

    def part(x, w):
        assert w.shape == ((128, 128) if along_k else (256, 64))
        y = gemm(x, w, preferred_element_type=jnp.float32)
        return jax.lax.psum(y, "x") if along_k else y

    specs = (P(None, "x"), P(None, "x")) if along_k else (P(), P("x"))
    out = P() if along_k else P(None, "x")
    f = jax.jit(jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=out))
    check(f(x, pack(q)), x, q)
    gradient = jax.jit(jax.grad(lambda x, w: f(x, w).sum()))(x, pack(q))
    wanted = np.asarray(q.dequantize(), np.float64).sum(1)
    np.testing.assert_allclose(
        np.asarray(gradient, np.float64),
        np.broadcast_to(wanted, x.shape),
        atol=2e-2 * np.abs(wanted).max(),
    )


@pytest.mark.parametrize("along_k", [False, True])
def test_explicit_axes(rng, along_k):
    mesh = mesh_of(2, AxisType.Explicit)
    q = weight(rng, "int4", (256, 128), 64)
    x = jnp.asarray(rng.normal(size=(4, 256)), jnp.bfloat16)
    with jax.set_mesh(mesh):
        w, rows = put(pack(q), mesh, P(None, "x") if along_k else P("x")), put(x, mesh, P())
        for function in (gemm, lambda x, w: gemm(x, w, bias=jnp.zeros(128))):
            y = jax.jit(function)(rows, w)
            check(y, x, q)
            assert jax.typeof(y).sharding.spec == P(None, None if along_k else "x")
        y = jax.jit(lambda x, w: gemm(x, w, out_sharding=P("x", None)))(rows, w)
        check(y, x, q)
        assert jax.typeof(y).sharding.spec == P("x", None)
        dequantized = P("x", None) if along_k else P(None, "x")
        assert jax.typeof(w.dequantize()).sharding.spec == dequantized
