"""Numbers of products with caches under ``fuse``: orders, types, special values, gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_attention import BF16, F32, B, D, G, R, T, any_size, in_kernels
from fusions import check, operations
from jax import lax

from jax_tcgemm import fuse
from jax_tcgemm.transforms import caches

pytestmark = pytest.mark.any_jax


@pytest.fixture(autouse=True)
def small_caches(monkeypatch):
    any_size(monkeypatch)


@pytest.fixture
def cached(normal):
    """Returns a cache and queries for it."""
    return normal(B, T, G, D, dtype=BF16), normal(B, 1, G * R, D, dtype=BF16)


def ordered(rng, letters: str) -> str:
    return "".join(rng.permutation(list(letters)))


@pytest.mark.parametrize("number", range(24))
def test_random_orders_of_dimensions(rng, number, monkeypatch):
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

    monkeypatch.setattr(caches, "_pays", lambda *_: True)
    if 1 not in (extents["b"], extents["g"]):  # JAX drops dimensions of extent 1
        assert in_kernels(f, x, cache) == 1
    want = exact(x, cache)
    got = np.asarray(jax.jit(fuse(f))(x, cache).astype(F32), np.float64)
    limit = 2.0**-20 if wide else 2.0**-8
    assert np.abs(got - want).max() <= limit * np.abs(want).max()


def repeated(keys):
    return jnp.repeat(keys, R, axis=2).astype(F32)


def wide(q, keys, **options):
    """The scores of float32 queries."""
    k = repeated(keys)
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
        got, want = np.asarray(jax.jit(fuse(wide))(x, keys)), np.asarray(jax.jit(wide)(x, keys))
        # A plane of a query may exceed it by 2^-8, and so overflow alone.
        with np.errstate(all="ignore"):
            exact = np.einsum(
                "bqhd,bkhd->bhqk", *(np.asarray(y, np.float64) for y in (x, repeated(keys)))
            )
            is_safe = ~(abs(abs(exact) / float(jnp.finfo(F32).max) - 1) < 2.0**-7)
        got, want = got[is_safe], want[is_safe]
        is_finite = np.isfinite(want)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
        np.testing.assert_array_equal(np.isfinite(got), is_finite)
        np.testing.assert_array_equal(np.sign(got)[~is_finite], np.sign(want)[~is_finite])
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
def test_precisions_without_a_kernel_change_nothing(cached, dtype, options):
    keys, q = cached

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
def test_other_orders_of_elements(cached, change):
    keys, _ = cached
    q = change(keys)[:, :, :2] + 1

    def f(q, keys):
        return jnp.einsum("tgqd,tgbd->tgqb", q, change(keys))

    assert in_kernels(f, q, keys) == 1
    check(f, q, keys, slack=4)


def test_gradients_of_float32_queries(wide_arrays):
    """Beside gradients of float32 keys: plain JAX rounds each repeated head, then their sum."""
    q, keys = wide_arrays

    def grads(f, keys):
        return jax.grad(lambda q, keys: jnp.sin(f(q, keys) / 4).sum(), argnums=(0, 1))(q, keys)

    for got, plain, exact in zip(
        grads(fuse(wide), keys), grads(wide, keys), grads(wide, keys.astype(F32)), strict=True
    ):
        own, rival = (float(jnp.abs(x.astype(F32) - exact).max()) for x in (got, plain))
        rounding = 2.0**-18 if got.dtype == F32 else 2.0**-8
        assert own <= 2 * rival + rounding * float(jnp.abs(exact).max())
