"""Groups of rows times packed weights: results, devices, custom calls."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from native_calls import calls_of
from packed_values import BF16, close, drawn, weight, wide
from ragged_problems import bounds, looped

from jax_tcgemm import _core, _extension, gated_ragged_dot, pack, ragged_dot
from jax_tcgemm.kernels import packed as kernels
from jax_tcgemm.partitioning import rules

COLLECTIVES = ("all-gather", "all-to-all", "reduce-scatter", "collective-permute")


def check(got, x, q, sizes, roundings=1):
    a, w = wide(x), wide(q.dequantize())
    size = looped(np.abs(a), np.abs(w), sizes)
    close(got, looped(a, w, sizes), size, a.shape[1], roundings)


@pytest.mark.parametrize(
    "sizes", [(3, 0, 2, 4), (0, 0, 0, 0), (9, 1, 0, 0), (-2, 3, 100, 5), (2, 1, 1, 1)], ids=str
)
def test_definition(rng, sizes):
    has_zeros = bool(rng.integers(2))
    q = weight(rng, "int4", (4, 66, 70), 33, has_zeros=has_zeros)
    x, sizes = drawn(rng, 9, 66), jnp.asarray(sizes, jnp.int32)
    for f in (ragged_dot, jax.jit(ragged_dot)):
        y = f(x, pack(q), sizes)
        assert y.dtype == BF16
        check(y, x, q, sizes)
    assert not np.any(wide(y)[bounds(sizes, 9)[-1] :])


def test_epilogues(rng):
    q = weight(rng, "uint4", (3, 64, 10), 32)
    x, sizes, bias = drawn(rng, 8, 64), jnp.array([3, 0, 2]), drawn(rng, 3, 10)
    a, w = wide(x), wide(q.dequantize(BF16))
    y = ragged_dot(
        x, pack(q), sizes, bias=bias, activation="gelu", preferred_element_type=jnp.float32
    )
    np.testing.assert_allclose(y, looped(a, w, sizes, bias, "gelu"), rtol=1e-4, atol=1e-3)
    y, z = ragged_dot(
        x,
        pack(q),
        sizes,
        epilogue=lambda z, r: (jnp.tanh(z) + r, z),
        epilogue_operands=[jnp.ones((8, 1))],
        preferred_element_type=jnp.float32,
    )
    np.testing.assert_allclose(z, looped(a, w, sizes), rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(y, np.tanh(np.asarray(z)) + 1, rtol=1e-5, atol=1e-6)


def test_errors():
    p = pack(weight(np.random.default_rng(0), "int4", (2, 64, 10), 32))
    x, sizes = jnp.zeros((3, 64), BF16), jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match=r"group_sizes.shape=\(3,\)"):
        ragged_dot(x, p, jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match="config='nothing'"):
        ragged_dot(x, p, sizes, config="nothing")
    with pytest.raises(ValueError, match="agree in k, got 65 and 64"):
        ragged_dot(jnp.zeros((3, 65), BF16), p, sizes)
    with pytest.raises(TypeError, match="preferred_element_type=int8"):
        ragged_dot(x, p, sizes, preferred_element_type=jnp.int8)
    other = pack(weight(np.random.default_rng(0), "int4", (2, 64, 12), 32))
    with pytest.raises(ValueError, match="rhs_up must have the shape"):
        gated_ragged_dot(x, p, other, sizes)


def test_no_groups(rng):
    p = pack(weight(rng, "int4", (0, 64, 10), 32))
    x, sizes = drawn(rng, 3, 64), jnp.zeros(0, jnp.int32)
    for options in ({}, {"activation": "gelu"}, {"bias": jnp.ones((0, 10), BF16)}):
        y = ragged_dot(x, p, sizes, **options)
        assert y.shape == (3, 10)
        assert not np.any(wide(y))
    jax.jit(ragged_dot).trace(x, p, sizes).lower(lowering_platforms=("cuda",))


# Devices


@pytest.mark.parametrize(
    ("w_spec", "x_spec"),
    [
        (P(None, "x"), P()),
        (P(None, None, "x"), P(None, "x")),
        (P("x"), P()),
        (P(), P("x")),
        (P("y", "x"), P()),
    ],
    ids=str,
)
def test_division(rng, monkeypatch, w_spec, x_spec):
    """Weights divided by columns, rows of k or experts, and rows of x; no weight travels."""
    monkeypatch.setenv(rules.SETTING, "everywhere")
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    q = weight(rng, "int4", (4, 256, 256), 64)
    x = drawn(rng, 24, 256)
    sizes = jnp.asarray(rng.multinomial(20, np.ones(4) / 4), jnp.int32)
    p = jax.device_put(pack(q), NamedSharding(mesh, w_spec))
    operands = jax.device_put(x, NamedSharding(mesh, x_spec)), p, sizes
    program = jax.jit(lambda *a: ragged_dot(*a)).lower(*operands).compile()
    y = program(*operands)
    np.testing.assert_array_equal(np.isnan(wide(y)), False)
    check(y, x, q, sizes, roundings=2)
    moved = [
        line
        for line in program.as_text().splitlines()
        if any(f" {name}(" in line for name in COLLECTIVES) and " u8[" in line
    ]
    assert not moved


# Kernels


def test_choice():
    assert kernels.choose_ragged(4, (64, 4096, 2048), 128, 64).tokens == 8
    assert kernels.choose_ragged(4, (640, 4096, 2048), 128, 64).tokens == 32
    assert kernels.choose_ragged(4, (64 * 40, 4096, 2048), 128, 64).tokens == 64
    assert kernels.choose_ragged(4, (64 * 100, 4096, 2048), 128, 64).tokens == 128
    assert kernels.choose_ragged(4, (64 * kernels.MOST_ROWS, 512, 512), 128, 64) is not None
    assert kernels.choose_ragged(4, (64 * kernels.MOST_ROWS + 1, 512, 512), 128, 64) is None
    # One row of one expert: k is divided as for one weight.
    assert kernels.choose_ragged(4, (1, 4096, 14336), 128, 8) == kernels.choose(
        4, 1, 4096, 14336, 128
    )
    # The tiles of many experts fill a GPU.
    assert kernels.choose_ragged(4, (64, 4096, 14336), 128, 64).split_k == 1


@pytest.mark.usefixtures("all_kernels")
@pytest.mark.parametrize(
    ("m", "count", "target"),
    [
        (40, 8, _extension.PACKED_RAGGED_TARGET),
        (2 * kernels.MOST_ROWS + 2, 2, _extension.UNPACK_TARGET),
    ],
)
def test_custom_calls(rng, m, count, target):
    if target not in _core.registrations():
        pytest.skip("no kernels were built")
    q = weight(rng, "int4", (count, 256, 70), 128)
    types = jax.tree.map(
        lambda y: jax.ShapeDtypeStruct(y.shape, y.dtype),
        (drawn(rng, m, 256), pack(q), jnp.ones(count, jnp.int32)),
    )
    lowered = jax.jit(lambda *a: ragged_dot(*a)).trace(*types).lower(lowering_platforms=("cuda",))
    calls = calls_of(lowered.compiler_ir("stablehlo"))
    own = [attributes for name, attributes, *_ in calls if name == target]
    assert len(own) == 1
    if target == _extension.PACKED_RAGGED_TARGET:
        expected = {"batch": count, "m": m, "n": 70, "k": 256, "weights_move": True}
        row = kernels.choose_ragged(4, (m, 70, 256), 128, count)
        expected |= dataclasses.asdict(row)
        assert {name: own[0][name] for name in expected} == expected


@pytest.mark.usefixtures("all_kernels")
def test_a_gradient_multiplies_operands_of_one_type(rng):
    if _extension.RAGGED_DOT_TARGET not in _core.registrations():
        pytest.skip("no kernels were built")
    q = weight(rng, "int4", (2, 256, 128), 128)
    operands = drawn(rng, 200, 256), pack(q), jnp.ones(2, jnp.int32)
    loss = lambda *a: ragged_dot(*a, activation="silu").astype(jnp.float32).sum()  # noqa: E731
    lowered = jax.jit(jax.grad(loss)).trace(*operands).lower(lowering_platforms=("cuda",))
    names = [name for name, *_ in calls_of(lowered.compiler_ir("stablehlo"))]
    assert names.count(_extension.RAGGED_DOT_TARGET) == 1
