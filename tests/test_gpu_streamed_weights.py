"""Few rows times 8-bit weights contiguous along n, which kernels read once, on a Hopper GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quantized_values import E4M3, E5M2, INT8, PAIRS, TYPES, drawn, wide

from jax_tcgemm import gated_gemm, gemm, ragged_dot
from jax_tcgemm.kernels import table as kernel_table
from jax_tcgemm.lowering import layout

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.usefixtures("never_apart", "streams")]

# Floats are multiplied as float16; tensor cores add them up in float32 and truncate sums.
STEP = 2.0**-20


@pytest.fixture
def streams(monkeypatch):
    """Fails if weights are transposed."""

    def made(self, x, _inner=layout.Factor.made):
        assert self.is_k_major or self.stays, self
        return _inner(self, x)

    monkeypatch.setattr(layout.Factor, "made", made)


def assert_product(y, a, b):
    exact, sizes = wide(a) @ wide(b), np.abs(wide(a)) @ np.abs(wide(b))
    if a.dtype == INT8:
        np.testing.assert_array_equal(np.asarray(y), exact)
        return
    assert y.dtype == jnp.float32
    assert np.all(np.abs(wide(y) - exact) <= STEP * sizes)


def product_of(a, b, **options):
    out = jnp.int32 if a.dtype == INT8 else jnp.float32
    run = jax.jit(lambda a, b: gemm(a, b, preferred_element_type=out, **options))
    return run(a, b)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0].__name__}-{pair[1].__name__}")
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 16, 16), (7, 144, 48), (16, 128, 4096), (17, 4112, 1040), (31, 272, 8208), (64, 64, 272)],
)
def test_residues(rng, pair, m, n, k):
    a, b = drawn(rng, (m, k), pair[0]), drawn(rng, (k, n), pair[1])
    assert_product(product_of(a, b), a, b)


ROWS = [row for row in kernel_table.RUN_TIME_CONFIGS if row.streams_b]
OF_ONE_MATRIX = [row for row in ROWS if row.grouped == "none"]
OF_GROUPS = [row for row in ROWS if row.grouped == "m"]


@pytest.mark.parametrize("row", OF_ONE_MATRIX, ids=lambda row: row.name)
def test_every_row(rng, row):
    m = int(rng.integers(1, 100))
    n, k = 16 * int(rng.integers(1, 100)), 16 * int(rng.integers(8 * row.split_k - 7, 100))
    of_a, of_b = (TYPES[tag] for tag in (row.arithmetic.a.tag, row.arithmetic.b.tag))
    if row.gated and of_a == INT8:
        pytest.skip("no integers are gated")
    a, b, up = drawn(rng, (m, k), of_a), drawn(rng, (k, n), of_b), drawn(rng, (k, n), of_b)
    precision = "highest" if row.arithmetic.promotes else None
    options = {"precision": precision, "config": row.name}
    if not row.gated:
        assert_product(product_of(a, b, **options), a, b)
        return
    options["preferred_element_type"] = jnp.float32
    both = jax.jit(lambda *x: gated_gemm(*x, epilogue=lambda g, u: (g, u), **options))
    for y, weight in zip(both(a, b, up), (b, up), strict=True):
        assert_product(y, a, weight)


# Group sizes: no rows; some groups empty; ends beyond all rows; more rows than exist; negative
# sizes, which count as none.
SIZES = {
    "even": [16, 16, 16, 16],
    "one row each": [1] * 40,
    "any": [0, 3, 40, 0, 17, 1, 0, 16, 33],
    "one has all": [0, 0, 90, 0],
    "rows of none": [5, 0, 2],
    "too many": [30, 1000, 20],
    "negative": [-4, 10, -1, 20],
}


def product_of_groups(a, b, sizes, **options):
    out = jnp.int32 if a.dtype == INT8 else jnp.float32
    options |= {"preferred_element_type": out, "epilogue": lambda acc, row: (acc, acc + row)}
    rows = jnp.arange(a.shape[0], dtype=out)[:, None]
    run = jax.jit(lambda *x: ragged_dot(*x, epilogue_operands=(rows,), **options))
    return run(a, b, jnp.asarray(sizes, jnp.int32))


def assert_groups(rng, types, sizes, n, k, **options):
    """Checks groups; rows outside all groups are the function of zeros."""
    m = sum(max(0, size) for size in sizes)
    m = m + 21 if m < 40 else min(m, 96)
    a, b = drawn(rng, (m, k), types[0]), drawn(rng, (len(sizes), k, n), types[1])
    y, with_rows = product_of_groups(a, b, sizes, **options)
    np.testing.assert_array_equal(with_rows, y + jnp.arange(m, dtype=y.dtype)[:, None])
    begin = 0
    for group, size in enumerate(sizes):
        end = min(m, begin + max(0, size))
        assert_product(y[begin:end], a[begin:end], b[group])
        begin = end
    assert not wide(y[begin:]).any()


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0].__name__}-{pair[1].__name__}")
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_groups(rng, pair, sizes):
    n, k = 16 * int(rng.integers(1, 40)), 16 * int(rng.integers(1, 80))
    assert_groups(rng, pair, sizes, n, k)


def test_groups_without_a_function(rng):
    a, b = drawn(rng, (40, 256), E4M3), drawn(rng, (5, 256, 192), E4M3)
    sizes = jnp.asarray([3, 0, 20, 9, 1], jnp.int32)
    y = jax.jit(lambda *x: ragged_dot(*x, preferred_element_type=jnp.float32))(a, b, sizes)
    group = np.repeat(np.arange(5), np.asarray(sizes))
    for row, its in enumerate(group):
        assert_product(y[row : row + 1], a[row : row + 1], b[its])
    assert not wide(y[33:]).any()


@pytest.mark.parametrize("row", OF_GROUPS, ids=lambda row: row.name)
def test_every_row_of_groups(rng, row):
    n, k = 16 * int(rng.integers(1, 40)), 16 * int(rng.integers(8 * row.split_k - 7, 100))
    types = [TYPES[tag] for tag in (row.arithmetic.a.tag, row.arithmetic.b.tag)]
    precision = "highest" if row.arithmetic.promotes else None
    sizes = rng.integers(0, 6, 7)  # and rows outside all groups
    assert_groups(rng, types, sizes, n, k, precision=precision, config=row.name)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("m", [3, 24])
@pytest.mark.parametrize("out", [E4M3, INT8], ids=lambda dtype: dtype.__name__)
def test_epilogues(rng, out, m, is_transposed):
    """A weight that is contiguous along k has the skinny kernels.

    Their accumulators have 14 bits, in which sums of small integers are exact.
    """
    n, k = 528, 1024
    a, b = (jnp.asarray(rng.integers(-3, 4, shape), E4M3) for shape in ((m, k), (k, n)))
    of_a = jnp.asarray(rng.uniform(0.5, 2, (m, 1)), jnp.float32)
    of_b = jnp.asarray(rng.uniform(0.5, 2, (1, n)), jnp.float32)
    bias = jnp.asarray(rng.normal(size=n), jnp.float32)
    residual = jnp.asarray(rng.normal(size=(m, n)), jnp.float32)

    def formula(z):
        y = jax.nn.gelu(z * of_a * of_b + bias) + residual
        limits = jnp.iinfo(out) if out == INT8 else jnp.finfo(out)
        q = jnp.round(y * 4) if out == INT8 else y * 4
        return jnp.clip(q, float(limits.min), float(limits.max)).astype(out), jnp.max(jnp.abs(y))

    run = jax.jit(
        lambda a, b: gemm(
            *(a, b),
            a_scale=of_a,
            b_scale=of_b.T if is_transposed else of_b,
            bias=bias,
            residual=residual,
            activation="gelu",
            out_scale=jnp.float32(0.25),
            return_amax=True,
            preferred_element_type=out,
            transpose_b=is_transposed,
        )
    )
    d, amax = run(a, b.T if is_transposed else b)
    expected, largest = formula(jnp.asarray(wide(a) @ wide(b), jnp.float32))
    assert abs(float(amax) - float(largest)) < 1e-5 * float(largest)
    steps = np.abs(wide(d) - wide(expected)) / (np.abs(wide(expected)) + 1)
    assert steps.max() <= (1 if out == INT8 else 2**-2)
    assert (steps > 0).mean() < 0.01  # sums close to a midpoint of two numbers


def test_batches(rng):
    own = drawn(rng, (5, 8, 160), E4M3), drawn(rng, (5, 160, 80), E5M2)
    shared = drawn(rng, (2, 3, 9, 160), E4M3), drawn(rng, (160, 80), E5M2)
    partly = drawn(rng, (2, 3, 5, 160), E4M3), drawn(rng, (3, 160, 80), E5M2)
    for a, b in (own, shared, partly):
        assert_product(product_of(a, b), a, b)


def test_infinities_and_nans_stay_where_they_are(rng):
    a, b = drawn(rng, (5, 96), E5M2), drawn(rng, (96, 64), E5M2)
    a = a.at[1, 70].set(jnp.inf).at[3, 2].set(jnp.nan)
    b = b.at[50, 9].set(-jnp.inf)
    y = product_of(a, b)
    with np.errstate(invalid="ignore"):
        exact = wide(a) @ wide(b)
    assert np.array_equal(np.isnan(y), np.isnan(exact))
    assert np.array_equal(np.isinf(y), np.isinf(exact))


def test_few_rows_in_a_graph_and_a_scan(rng):
    a, b = drawn(rng, (4, 256), E4M3), drawn(rng, (3, 256, 256), E4M3)

    def layer(x, w):
        y = gemm(x, w, a_scale=0.05, activation="relu", preferred_element_type=jnp.float32)
        return y.astype(E4M3), y

    ys = jax.jit(lambda a, b: jax.lax.scan(layer, a, b)[1])(a, b)
    x = a
    for y, w in zip(ys, b, strict=True):
        exact = np.maximum(0.05 * wide(x) @ wide(w), 0)
        assert np.max(np.abs(wide(y) - exact)) <= 1e-5 * np.max(exact)
        x = y.astype(E4M3)
