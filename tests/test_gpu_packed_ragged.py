"""Groups of rows times packed weights on a Hopper GPU, compared with float64 and ``jax.numpy``."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_accuracy import poison
from packed_problems import FLOATS, exact_weight, wrong
from packed_values import QTYPES, weight, wide
from ragged_problems import bounds

from jax_tcgemm import Quantized, _extension, pack, ragged_dot
from jax_tcgemm.kernels import packed as kernels

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

DRAWN = 64
FORMATS = [*((qtype, False) for qtype in QTYPES), ("int4", True), ("uint4", True)]
SIZES = {
    "one row each": [1] * 8,
    "none": [0] * 8,
    "all in the last": [0] * 7 + [50],
    "two tiles and empty ones": [17, 0, 0, 33, 0, 9, 0, 1],
    "fewer rows than given": [5, 0, 3, 0, 0, 0, 0, 4],
    "negative and too many": [-3, 7, -1, 1000, 5, 2**31 - 1, 0, 3],
}


def of_group(q: Quantized, group: int) -> Quantized:
    return jax.tree.map(lambda y: y[group], q)


def check(got, x, q: Quantized, sizes) -> None:
    """Compares each group with its product; other rows must be zero."""
    at = bounds(sizes, len(x))
    for group in range(len(sizes)):
        rows = slice(at[group], at[group + 1])
        if at[group] == at[group + 1]:
            continue
        what = wrong(got[rows], x[rows], of_group(q, group))
        assert what is None, (group, what)
    assert not np.any(wide(got)[at[-1] :])


def compute(x, q, sizes, output="bfloat16"):
    run = functools.partial(ragged_dot, config="kernel", preferred_element_type=output)
    p, sizes = pack(q), jnp.asarray(sizes, jnp.int32)
    poison((len(x), p.shape[-1]), output)
    return jax.jit(run)(x, p, sizes)


def draw(rng, m, count, n, k, group, qtype="int4", has_zeros=False, scale="bfloat16"):
    q = weight(rng, qtype, (count, k, n), group, has_zeros=has_zeros, scale_dtype="float32")
    q = Quantized(q.qvalue, (q.scale * k**-0.5).astype(scale), q.zero_point, q.qtype)
    return jnp.asarray(rng.normal(size=(m, k)), jnp.bfloat16), q


@pytest.mark.parametrize("mean", [1, 3, 8, 16, 32, 100])
@pytest.mark.parametrize(("qtype", "has_zeros"), FORMATS)
def test_every_format_and_tile(rng, qtype, has_zeros, mean):
    count = int(rng.integers(1, 9))
    m = mean * count
    group = int(rng.choice([32, 64, 128]))
    n, k = int(rng.integers(1, 300)), 128 * int(rng.integers(1, 6))
    x, q = draw(rng, m, count, n, k, group, qtype, has_zeros, str(rng.choice(FLOATS)))
    sizes = rng.multinomial(m - int(rng.integers(0, 2)), rng.dirichlet(np.ones(count)))
    output = str(rng.choice(["bfloat16", "float32"]))
    check(compute(x, q, sizes, output), x, q, sizes)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("m", [50, 200])
def test_sizes(rng, name, m):
    x, q = draw(rng, m, 8, 132, 320, 64)
    sizes = np.asarray(SIZES[name])
    check(compute(x, q, sizes), x, q, np.clip(sizes, 0, m))


@pytest.mark.parametrize("count", [31, 32, 33, 64, 200])
def test_many_experts(rng, count):
    m = int(rng.integers(1, 2 * count))
    x, q = draw(rng, m, count, 64, 128, 64)
    sizes = rng.multinomial(m, np.ones(count) / count)
    check(compute(x, q, sizes), x, q, sizes)


@pytest.mark.parametrize("index", range(DRAWN))
def test_drawn_problems(rng, index):
    del index
    count, m = int(rng.integers(1, 40)), int(rng.integers(1, 300))
    n, k = int(rng.integers(1, 200)), 64 * int(rng.integers(1, 12))
    group = int(rng.choice([group for group in (32, 64, 128, k) if k % group == 0]))
    qtype = str(rng.choice(QTYPES))
    has_zeros = qtype.endswith("int4") and bool(rng.integers(2))
    x, q = draw(rng, m, count, n, k, group, qtype, has_zeros)
    weights = rng.dirichlet(np.full(count, 0.3))
    sizes = rng.multinomial(int(rng.integers(0, m + 1)), weights)
    check(compute(x, q, sizes), x, q, sizes)


@pytest.mark.parametrize("m", [3, 40])
def test_parts_of_k(rng, monkeypatch, m):
    monkeypatch.setattr(kernels, "_LEAST_K", 256)
    x, q = draw(rng, m, 2, 100, 2048, 128)
    row = kernels.choose_ragged(4, (m, 100, 2048), 128, 2)
    assert row is not None
    assert row.split_k > 1
    check(compute(x, q, [m - 1, 1]), x, q, [m - 1, 1])


def test_special_values_stay_in_their_rows(rng):
    x, q = draw(rng, 12, 3, 64, 128, 64)
    x = x.at[4].set(jnp.nan)
    got = compute(x, q, [4, 4, 3])
    assert np.isnan(wide(got)[4]).all()
    others = np.delete(np.arange(12), 4)
    assert np.isfinite(wide(got)[others]).all()
    scale = q.scale.at[1].set(jnp.nan)
    got = wide(compute(x, Quantized(q.qvalue, scale, None, q.qtype), [6, 0, 5]))
    assert np.isfinite(got[others]).all()


def test_many_rows_are_dequantized_by_a_kernel(rng):
    m = 2 * kernels.MOST_ROWS + 3
    x, q = draw(rng, m, 2, 70, 192, 64)
    run = jax.jit(functools.partial(ragged_dot, config="kernel"))
    p, sizes = pack(q), jnp.array([m - 9, 5])
    text = run.lower(x, p, sizes).as_text()
    assert _extension.UNPACK_TARGET in text
    assert _extension.RAGGED_DOT_TARGET in text
    check(run(x, p, sizes), x, q, [m - 9, 5])


def test_gradient_and_scan(rng):
    x, q = draw(rng, 20, 4, 256, 256, 64)
    sizes = [3, 0, 10, 5]

    def loss(x, p, sizes):
        step = lambda x, _: (ragged_dot(x, p, sizes) * 0.5, None)  # noqa: E731
        return jax.lax.scan(step, x, length=2)[0].astype(jnp.float32).sum()

    own = jnp.asarray(sizes, jnp.int32)
    got = wide(jax.jit(jax.grad(loss))(x, pack(q), own))
    at, w = bounds(sizes, 20), exact_weight(q)
    wanted = np.zeros((20, 256))
    for group in range(4):
        rows = slice(at[group], at[group + 1])
        wanted[rows] = np.ones(256) @ w[group].T * 0.25 @ w[group].T
    np.testing.assert_allclose(got, wanted, atol=3e-2 * np.abs(wanted).max())
