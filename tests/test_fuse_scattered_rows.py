"""Scatter-adds of rows: ``fuse`` adds those of 16 bits in float32; others stay unchanged."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from sharded_program import mesh_of

from jax_tcgemm import fuse
from jax_tcgemm.transforms import scattered_rows

pytestmark = pytest.mark.any_jax

WIDTH = 24
MODES = ["fill", "promise_in_bounds", "clip"]


def stays(f, *args):
    """Checks if a function has as many scatter-adds of 16 bits under ``fuse`` as without."""
    texts = [str(jax.make_jaxpr(g)(*args)) for g in (fuse(f), f)]
    own, plain = (len(re.findall(r":b?f16\[\S* = scatter-add", text)) for text in texts)
    return own == plain


def added(table, ids, rows, mode="fill"):
    return table.at[ids].add(rows, mode=mode)


def draw(count=3, ids=(5, 80), dtype=jnp.bfloat16, width=(WIDTH,), seed=0):
    rng = np.random.default_rng(seed)
    table = jnp.asarray(rng.normal(size=(count, *width)), dtype)
    rows = jnp.asarray(rng.normal(size=(*ids, *width)), dtype)
    return table, jnp.asarray(rng.integers(0, count, ids), jnp.int32), rows


def expected(table, ids, rows):
    """Computes the sums in float64; it skips indices outside the rows."""
    sums = np.asarray(table, np.float64)
    for index, row in zip(np.ravel(ids), np.reshape(rows, (-1, *table.shape[1:])), strict=True):
        if 0 <= index < len(sums):
            sums[index] += np.asarray(row, np.float64)
    return sums


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("count", "ids", "width"),
    [
        *((1, (64,), (8,)), (2, (300,), (3, 5)), (900, (4, 256), (8,)), (3, (2, 5, 20), ())),
        *((1025, (4, 256), (8,)), (199, (2, 5, 10), (5,))),  # a sum for each added row
    ],
)
def test_rows_are_added_in_float32_and_rounded_once(dtype, mode, count, ids, width):
    arrays = draw(count, ids, dtype, width)
    assert not stays(lambda *x: added(*x, mode=mode), *arrays)
    actual = jax.jit(fuse(lambda *x: added(*x, mode=mode)))(*arrays)
    assert actual.dtype == dtype
    exact = expected(*arrays)
    scale = np.abs(np.asarray(arrays[2], np.float64)).sum()
    error = np.abs(np.asarray(actual, np.float64) - exact)
    assert np.all(error <= jnp.finfo(dtype).eps * np.abs(exact) + 1e-6 * scale)


@pytest.mark.parametrize("ids_dtype", [jnp.int32, jnp.uint8, jnp.int8])
@pytest.mark.parametrize("count", [3, 90])
def test_indices_beyond_the_rows(monkeypatch, ids_dtype, count):
    monkeypatch.setattr(scattered_rows, "_is_small", lambda operand, _: operand.shape[0] == 3)
    table, ids, rows = draw(count, (400,))
    # Negative indices count from the end; jnp makes them positive before it scatters.
    ids = jnp.where(jnp.arange(400) % 3 == 0, 100, ids).astype(ids_dtype)
    for mode in ("fill", "clip"):
        wanted = np.asarray(ids, np.int64)
        wanted = np.clip(wanted, 0, count - 1) if mode == "clip" else wanted
        actual = fuse(lambda *x, mode=mode: added(*x, mode=mode))(table, ids, rows)
        np.testing.assert_allclose(
            np.asarray(actual, np.float64), expected(table, wanted, rows), rtol=1e-2, atol=1e-2
        )


@pytest.mark.parametrize("count", [50, 400])
def test_rows_that_get_nothing_keep_their_bits(count):
    table, ids, rows = draw(count, (90,))
    table = table.at[7].set(jnp.nan).at[8].set(-0.0)
    ids = jnp.where(ids < 9, 9, ids)
    actual = jax.jit(fuse(added))(table, ids, rows)
    kept = np.setdiff1d(np.arange(count), ids)
    bits = [np.asarray(x)[kept].view(np.uint16) for x in (actual, table)]
    np.testing.assert_array_equal(*bits)


@pytest.mark.parametrize("count", [3, 2000])
def test_an_infinity_reaches_its_own_row_alone(count):
    table, ids, rows = draw(count, (400,))
    rows = rows.at[7].set(jnp.inf).at[8].set(jnp.nan)
    ids = ids.at[7:9].set(1)
    actual = fuse(added)(table, ids, rows)
    assert jnp.isnan(actual[1]).all()
    assert jnp.isfinite(jnp.delete(actual, 1, 0)).all()


def test_the_gradient_of_a_small_embedding():
    def loss(table, w, ids):
        x = table[ids]
        return jnp.sum(jnp.tanh(x @ w).astype(jnp.float32) ** 2)

    table, ids, _ = draw(2, (4, 128))
    w = draw(WIDTH, (1,), width=(16,))[0]
    step = jax.value_and_grad(loss, argnums=(0, 1))
    assert not stays(step, table, w, ids)
    for actual, wanted in zip(
        jax.tree.leaves(jax.jit(fuse(step))(table, w, ids)),
        jax.tree.leaves(step(table.astype(jnp.float32), w.astype(jnp.float32), ids)),
        strict=True,
    ):
        difference = actual.astype(jnp.float32) - wanted
        assert jnp.linalg.norm(difference) <= 0.02 * jnp.linalg.norm(wanted)


@pytest.mark.parametrize(
    ("arrays", "f"),
    [
        (draw(dtype=jnp.float32), added),
        (draw(3, (63,)), added),
        (draw(769, (64,)), added),  # a change of few rows
        (draw(), lambda table, ids, rows: table.at[ids].add(rows, unique_indices=True)),
        (draw(), lambda table, ids, rows: table.T.at[:, ids].add(jnp.moveaxis(rows, -1, 0))),
        (draw(), lambda table, ids, rows: table.at[ids, :8].add(rows[..., :8])),
        (draw(), lambda table, ids, rows: table.at[ids].max(rows)),
        (draw(), lambda table, ids, rows: jax.vmap(added, (None, 0, 0))(table, ids, rows)),
    ],
)
def test_others_stay(arrays, f):
    assert stays(f, *arrays)
    np.testing.assert_array_equal(f(*arrays), fuse(f)(*arrays))


@pytest.mark.parametrize("count", [3, 2000])
def test_its_own_derivatives_are_those_of_the_additions(count):
    arrays = draw(count, (400,))

    def loss(f):
        return lambda table, rows: jnp.sum(f(table, arrays[1], rows).astype(jnp.float32) ** 2)

    for own, wanted in zip(
        jax.grad(loss(fuse(added)), (0, 1))(arrays[0], arrays[2]),
        jax.grad(loss(added), (0, 1))(*(arrays[i].astype(jnp.float32) for i in (0, 2))),
        strict=True,
    ):
        np.testing.assert_allclose(np.asarray(own, np.float32), wanted, rtol=0.05, atol=0.3)


def test_an_operation_on_a_mesh_of_its_own():
    """JAX traces an operation like this for the sharding of its result."""
    mesh = mesh_of((4,), jax.sharding.AxisType.Explicit)
    table, ids, _ = draw(3, (400,))

    def loss(table, ids):
        rows = table.at[ids].get(out_sharding=jax.sharding.PartitionSpec("x"))
        return jnp.sum(rows.astype(jnp.float32) ** 2)

    with jax.set_mesh(mesh):
        assert not stays(jax.grad(loss), table, ids)
        own, plain = (jax.jit(f)(table, ids) for f in (fuse(jax.grad(loss)), jax.grad(loss)))
        assert jax.typeof(own) == jax.typeof(plain)
        own, plain = (np.asarray(x, np.float64) for x in (own, plain))
        np.testing.assert_allclose(own, plain, rtol=0.1, atol=1)


def test_indices_that_do_not_hold_the_number_of_rows():
    table, ids, rows = draw(8, (600,))
    numbers = lax.ScatterDimensionNumbers((1,), (0,), (0,))

    def f(table, ids, rows):
        return lax.scatter_add(table, ids[:, None], rows, numbers, mode="clip")

    assert not stays(f, table, ids.astype(jnp.int4), rows)
    own = fuse(f)(table, ids.astype(jnp.int4), rows)
    np.testing.assert_allclose(
        np.asarray(own, np.float64), expected(table, ids, rows), rtol=1e-2, atol=1e-2
    )


def test_shards_are_added_up():
    mesh = mesh_of((4,))
    table, ids, rows = draw(3, (1024,))
    spec = jax.sharding.PartitionSpec

    def by_shards(table, ids, rows):
        return lax.psum(added(table, ids, rows @ jnp.eye(WIDTH, dtype=rows.dtype)), "x")

    f = jax.shard_map(
        by_shards, mesh=mesh, in_specs=(spec(), spec("x"), spec("x")), out_specs=spec()
    )
    nothing = jnp.zeros_like(table)
    assert not stays(f, nothing, ids, rows)
    actual = np.asarray(jax.jit(fuse(f))(nothing, ids, rows), np.float64)
    # The values of the shards are rounded, and so are their sums.
    np.testing.assert_allclose(actual, expected(nothing, ids, rows), rtol=0.02, atol=0.5)
