"""Products of a decode step with a cache under ``fuse``: one kernel reads the cache once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fusions import check, operations
from jax import lax

from jax_tcgemm import fuse
from jax_tcgemm.transforms import caches

# Sequences, entries, heads of the cache, heads of the queries for each, and the extent of a head.
B, T, G, R, D = 3, 40, 2, 4, 16
BF16, F32 = jnp.bfloat16, jnp.float32


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    """Lets small caches count as large ones."""
    for name in ("_LEAST_BYTES", "_LEAST_REPEATED_BYTES", "_LEAST_BYTES_OF_ONE", "_LEAST_HEAD"):
        monkeypatch.setattr(caches, name, 1)


@pytest.fixture
def arrays(normal):
    """Returns a cache of keys, one of values, the queries and the new entry of both caches."""
    shapes = ((B, T, G, D), (B, T, G, D), (B, 1, G * R, D), (B, 1, G, D))
    return [normal(*shape, dtype=BF16) for shape in shapes]


def updated(keys, values, new):
    at = (0, 3, 0, 0)
    return lax.dynamic_update_slice(keys, new, at), lax.dynamic_update_slice(values, new, at)


def repeated(keys, values, q, new):
    """Attention as transformers' Flax models have it: heads of the cache are repeated."""
    keys, values = updated(keys, values, new)
    k, v = (jnp.repeat(x, R, axis=2) for x in (keys, values))
    scores = jnp.einsum("...qhd,...khd->...hqk", q.astype(F32) / 4, k.astype(F32))
    y = jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(scores).astype(BF16), v)
    return y, keys, values


def grouped(keys, values, q, new):
    keys, values = updated(keys, values, new)
    return jax.nn.dot_product_attention(q, keys, values), keys, values


def in_kernels(f, *args: Any) -> int:
    return sum("cache once" in each.reason for each in fuse(f).report(*args))


@pytest.mark.parametrize("f", [repeated, grouped])
def test_a_step_of_attention(arrays, f):
    assert in_kernels(f, *arrays) == 2
    assert operations(fuse(f), *arrays)["dot_general"] == 0
    check(f, *arrays, slack=4)


@pytest.mark.parametrize("f", [repeated, grouped])
def test_the_cache_is_neither_repeated_nor_transposed(arrays, f):
    """What is left of such operations concerns the queries and the results."""
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
        (64, 1, 2**30, 128, True),
        (65, 1, 2**30, 128, False),
    ],
)
def test_which_caches_pay(monkeypatch, rows, repeats, size, values, pays):
    monkeypatch.undo()
    assert caches._pays(rows, repeats, size, values) == pays


# --- Numbers -------------------------------------------------------------------------------------


def ordered(rng, letters: str) -> str:
    return "".join(rng.permutation(list(letters)))


@pytest.mark.parametrize("number", range(24))
def test_random_orders_of_dimensions(rng, number):
    """Beside float64: any order of dimensions, either product, repeated or not, 16 or 32 bits."""
    extents = dict(zip("btgrqd", rng.choice([1, 2, 3, 5, 8], 6), strict=True))
    extents["t"], extents["d"] = 24, 16
    wide, is_repeated, sums_entries = (bool(x) for x in rng.integers(0, 2, 3))
    cache_order = ordered(rng, "btgd")
    own, kept = ("t", "d") if sums_entries else ("d", "t")
    x_order, y_order = ordered(rng, f"bgrq{own}"), ordered(rng, f"bgrq{kept}")
    cache = rng.standard_normal([extents[i] for i in cache_order]).astype(np.float32)
    x = rng.standard_normal([extents[i] for i in x_order]).astype(np.float32)
    cache = jnp.asarray(cache, BF16)
    x = jnp.asarray(x, F32 if wide and number % 3 else BF16)

    def f(x, cache):
        if wide:
            x, cache = x.astype(F32), cache.astype(F32)
        if not is_repeated:
            return jnp.einsum(f"{x_order},{cache_order}->{y_order}", x, cache)
        # The heads of the cache are repeated, and those of the queries are one dimension.
        at = cache_order.index("g")
        cache = jnp.repeat(cache, extents["r"], axis=at)
        x = jnp.einsum(f"{x_order}->bgrq{own}", x)
        x = x.reshape(extents["b"], -1, extents["q"], extents[own])
        y = jnp.einsum(f"bhq{own},{cache_order.replace('g', 'h')}->bhq{kept}", x, cache)
        y = y.reshape(*(extents[i] for i in "bgrq"), extents[kept])
        return jnp.einsum(f"bgrq{kept}->{y_order}", y)

    def exact(x, cache):
        operands = (np.asarray(each.astype(F32), np.float64) for each in (x, cache))
        return np.einsum(f"{x_order},{cache_order}->{y_order}", *operands)

    # JAX drops dimensions of extent 1. XLA computes some products of one row.
    if 1 not in (extents["b"], extents["g"], extents["r"] * extents["q"]):
        assert in_kernels(f, x, cache) == 1
    want = exact(x, cache)
    got = np.asarray(jax.jit(fuse(f))(x, cache).astype(F32), np.float64)
    limit = 2.0**-20 if wide else 2.0**-8
    assert np.abs(got - want).max() <= limit * np.abs(want).max()


def wide(q, keys, **options):
    """The scores of float32 queries."""
    k = jnp.repeat(keys, R, axis=2).astype(F32)
    return jnp.einsum("bqhd,bkhd->bhqk", q, k, **{"precision": "highest", **options})


@pytest.fixture
def wide_arrays(normal):
    return normal(B, 1, G * R, D, dtype=F32), normal(B, T, G, D, dtype=BF16)


def test_float32_queries_keep_their_numbers(wide_arrays):
    """Three bfloat16 planes hold a float32 number."""
    q, keys = wide_arrays
    q = q.at[1, 0, 0].set(1e-25).at[0, 0, 2, 3].set(1e30)
    assert in_kernels(wide, q, keys) == 1
    got, want = jax.jit(fuse(wide))(q, keys), jax.jit(wide)(q, keys)
    limit = 2.0**-20 * jnp.abs(want).max(-1, keepdims=True)
    assert bool((jnp.abs(got - want) <= limit).all())


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 3e38, 3.4e38])
@pytest.mark.parametrize("where", ["q", "keys"])
def test_special_values(wide_arrays, value, where):
    q, keys = wide_arrays
    keys = keys * BF16(2**-8)
    if where == "q":
        q = q.at[0, 0, 0, 0].set(value).at[0, 0, 1, 2].set(-value)
    else:
        keys = keys.at[0, 0, 0, 0].set(BF16(value))
    for x in (q, jnp.ones_like(q)):
        got, want = jax.jit(fuse(wide))(x, keys), jax.jit(wide)(x, keys)
        is_finite = jnp.isfinite(want)
        np.testing.assert_array_equal(jnp.isnan(got), jnp.isnan(want))
        np.testing.assert_array_equal(jnp.isfinite(got), is_finite)
        np.testing.assert_array_equal(jnp.sign(got)[~is_finite], jnp.sign(want)[~is_finite])
        np.testing.assert_allclose(got[is_finite], want[is_finite], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", ["F16_F16_F32", "BF16_BF16_BF16", "F32_F32_F32"])
def test_the_users_default_precision_does_not_replace_the_programs(wide_arrays, name):
    q, keys = wide_arrays
    with jax.default_matmul_precision(name):
        got, want = jax.jit(fuse(wide))(q * 1e6, keys), jax.jit(wide)(q * 1e6, keys)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=30)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (BF16, {"precision": jax.lax.DotAlgorithmPreset.F32_F32_F32}),
        (F32, {"precision": jax.lax.DotAlgorithmPreset.TF32_TF32_F32}),
    ],
)
def test_precisions_without_a_kernel_change_nothing(arrays, dtype, options):
    keys, _, q, _ = arrays

    def f(q, keys):
        k = jnp.repeat(keys, R, axis=2).astype(dtype)
        return jnp.einsum("bqhd,bkhd->bhqk", q.astype(dtype), k, **options)

    assert in_kernels(f, q, keys) == 0
    own, plain = (operations(g, q, keys) for g in (fuse(f), f))
    assert own == plain


@pytest.mark.parametrize(
    "change",
    [
        lambda k: lax.reshape(k, (T, G, B, D), dimensions=(1, 2, 0, 3)),
        lambda k: jnp.reshape(k, (D, G, T, B), order="F").transpose(2, 1, 3, 0),
        lambda k: k.transpose(1, 2, 0, 3),
    ],
    ids=["dimensions", "order", "transpose"],
)
def test_other_orders_of_elements(arrays, change):
    keys, *_ = arrays
    q = change(keys)[:, :, :2] + 1

    def f(q, keys):
        return jnp.einsum("tgqd,tgbd->tgqb", q, change(keys))

    assert in_kernels(f, q, keys) == 1
    check(f, q, keys, slack=4)


def test_gradients_of_float32_queries(wide_arrays):
    def loss(f, q, keys):
        return jnp.sin(f(q, keys) / 4).sum()

    grads = [jax.grad(loss, argnums=(1, 2))(f, *wide_arrays) for f in (fuse(wide), wide)]
    for got, want in zip(*grads, strict=True):
        limit = 2.0**-18 if want.dtype == F32 else 2.0**-7
        assert float(jnp.abs(got - want).max()) <= limit * float(jnp.abs(want).max())


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
