"""Products of a decode step with a cache under ``fuse``: one kernel reads the cache once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_attention import (
    BF16,
    F32,
    B,
    D,
    G,
    R,
    T,
    any_size,
    grouped,
    in_kernels,
    repeated,
    updated,
)
from fusions import check, operations
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tcgemm
from jax_tcgemm import fuse
from jax_tcgemm.tools.collectives import collectives
from jax_tcgemm.transforms import caches


@pytest.fixture(autouse=True)
def small_caches(monkeypatch):
    any_size(monkeypatch)


@pytest.fixture
def arrays(normal):
    """Returns a cache of keys, one of values, the queries and the new entry of both caches."""
    shapes = ((B, T, G, D), (B, T, G, D), (B, 1, G * R, D), (B, 1, G, D))
    return [normal(*shape, dtype=BF16) for shape in shapes]


@pytest.mark.parametrize("f", [repeated, grouped])
def test_a_step_of_attention(arrays, f):
    assert in_kernels(f, *arrays) == 2
    assert operations(fuse(f), *arrays)["dot_general"] == 0
    check(f, *arrays, slack=4)


@pytest.mark.parametrize("f", [repeated, grouped])
def test_the_cache_is_neither_repeated_nor_transposed(arrays, f):
    """Only the queries and the results are."""
    traced = jax.jit(fuse(f)).trace(*arrays)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    cache = f"tensor<{B}x{T}x{G}x{D}xbf16>"
    lines = [line for line in text.splitlines() if f"({cache})" in line.replace(" ", "")]
    assert text.count("custom_call @jax_tcgemm_gemm") == 2
    assert not [line for line in lines if "transpose" in line or "broadcast" in line]


def test_one_row_for_each_head(normal):
    """XLA reads the keys for one row at the speed of memory, but not the values."""
    keys, values = (normal(B, T, G, D, dtype=BF16) for _ in range(2))
    q, new = (normal(B, 1, G, D, dtype=BF16) for _ in range(2))

    def f(keys, values, q, new):
        keys, values = updated(keys, values, new)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, keys)
        return jnp.einsum("bhqk,bkhd->bqhd", jnp.tanh(scores), values), keys, values

    assert in_kernels(f, keys, values, q, new) == 1
    check(f, keys, values, q, new, slack=4)


@pytest.mark.parametrize(
    ("rows", "repeats", "size", "values", "pays"),
    [
        (1, 1, 2**24, 128, True),
        (1, 1, 2**23, 128, False),
        (1, 1, 2**28, 64, False),
        (1, 1, 2**28, 0, False),  # the keys
        (4, 1, 2**22, 0, True),
        (4, 1, 2**21, 0, False),
        (4, 4, 2**21, 0, True),
        (2, 2, 2**24, 0, False),
        (2, 2, 2**24, 64, True),
        (64, 1, 2**30, 128, True),
        (65, 1, 2**30, 128, False),
    ],
)
def test_which_caches_pay(monkeypatch, rows, repeats, size, values, pays):
    monkeypatch.undo()
    assert caches._pays(rows, repeats, size, values) == pays


def test_derivatives_and_batches_of_the_rewritten_step(arrays):
    keys, values, q, new = arrays

    def loss(q, step):
        return jnp.sin(step(keys, values, q.astype(BF16), new)[0].astype(F32)).sum()

    q = q.astype(F32)
    got, want = (jax.grad(loss)(q, step) for step in (fuse(grouped), grouped))
    np.testing.assert_allclose(got, want, atol=0.05 * float(jnp.abs(want).max()))
    stacked = [jnp.stack([x, -x]) for x in arrays]
    got, want = (jax.vmap(step)(*stacked)[0] for step in (fuse(repeated), repeated))
    np.testing.assert_allclose(got.astype(F32), want.astype(F32), atol=0.05)


# --- Devices and export --------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [P(None, None, "x"), P("y"), P("y", None, "x")])
@pytest.mark.parametrize("f", [repeated, grouped])
def test_caches_divided_by_heads_and_sequences_stay_where_they_are(normal, f, spec):
    shapes = ((4, T, G, D), (4, T, G, D), (4, 1, G * R, D), (4, 1, G, D))
    arrays = [normal(*shape, dtype=BF16) for shape in shapes]
    mesh = jax.make_mesh((2, 2), ("x", "y"), (jax.sharding.AxisType.Auto,) * 2)
    divided = [jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays]
    assert in_kernels(f, *divided) == 2
    compiled = jax.jit(fuse(f)).lower(*divided).compile()
    assert not collectives(compiled.as_text(), 4)
    for got, want in zip(compiled(*divided), jax.jit(f)(*arrays), strict=True):
        np.testing.assert_allclose(got.astype(F32), want.astype(F32), atol=0.05)


def test_an_exported_step(arrays):
    checks = jax_tcgemm.export_disabled_checks()
    exported = jax.export.export(
        jax.jit(fuse(grouped)), platforms=("cpu", "cuda"), disabled_checks=checks
    )(*arrays)
    loaded = jax.export.deserialize(exported.serialize())
    got, want = loaded.call(*arrays)[0], jax.jit(grouped)(*arrays)[0]
    np.testing.assert_allclose(got.astype(F32), want.astype(F32), atol=0.05)


# --- Products that stay XLA's --------------------------------------------------------------------


def test_a_cache_that_a_loop_carries_or_slices(arrays):
    """The layers of a model may be the turns of a ``scan``, or the tokens that it generates."""

    def carried(keys, values, q, new):
        def body(state, _):
            y, keys, values = repeated(state[0], state[1], q, new)
            return (keys, values), y

        return lax.scan(body, (keys, values), None, length=2)

    def sliced(keys, values, q, new):
        def body(q, each):
            y, keys, values = repeated(each[0], each[1], q, new)
            return q + y, (keys, values)

        return lax.scan(body, q, (jnp.stack([keys, values]), jnp.stack([values, keys])))

    remat = jax.checkpoint(repeated)

    def checkpointed(keys, values, q, new):
        def body(q, each):
            y, keys, values = remat(each[0], each[1], q, new)
            return q + y, (keys, values)

        return lax.scan(body, q, (jnp.stack([keys, values]), jnp.stack([values, keys])))

    for f in (carried, sliced, checkpointed):
        assert in_kernels(f, *arrays) == 2
    check(carried, *arrays, slack=4)
    check(sliced, *arrays, slack=4)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.astype(jnp.int8).astype(x.dtype) * x.dtype.type(0.5),  # dequantized
        lambda x: x + 1,
        lambda x: x[:, :8],
        lambda x: x.astype(jnp.float16),
    ],
)
def test_values_that_are_not_stored(arrays, change):
    keys, _, q, _ = arrays
    q = q[:, :, :G]

    def f(q, keys):
        return jnp.einsum("bqgd,bkgd->bgqk", jnp.concatenate([q, q], 1), change(keys))

    assert in_kernels(f, q, keys) == 0
    check(f, q, keys, slack=4)
    change = jnp.asarray
    assert in_kernels(f, q, keys) == 1


def test_experts(normal):
    """A single batch dimension may be that of experts."""
    x, w = normal(G, 3, D, dtype=BF16), normal(G, D, T, dtype=BF16)

    def f(x, w):
        return jnp.einsum("ecd,edf->ecf", x, w)

    assert in_kernels(f, x, w) == 0


def test_tiled_heads(normal):
    """Repeated in another order: head h reads head h modulo G."""
    keys, q = normal(B, T, G, D, dtype=BF16), normal(B, 1, G * R, D, dtype=BF16)

    def f(q, keys):
        return jnp.einsum("bqhd,bkhd->bhqk", q, jnp.tile(keys, (1, 1, R, 1)))

    assert in_kernels(f, q, keys) == 0
    check(f, q, keys, slack=4)
