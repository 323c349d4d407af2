"""Quantized products on a Hopper GPU: every pair of types and layout, scales, residues."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quantized_values import E4M3, E5M2, INT8, PAIRS, TYPES, drawn, wide
from random_outcome import stored

from jax_tcgemm import gated_gemm, gemm, ragged_dot
from jax_tcgemm.kernels import table as kernel_table
from jax_tcgemm.lowering import jit_epilogue as lowering
from jax_tcgemm.lowering import layout as operand_layout

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.usefixtures("never_apart")]

BF16 = jnp.bfloat16
# Tensor cores keep 14 bits in a sum.
STEP = 2.0**-13


def product(a, b, layout, **options):
    ta, tb = (letter == "t" for letter in layout)
    run = jax.jit(lambda a, b: gemm(a, b, transpose_a=ta, transpose_b=tb, **options))
    return run(stored(a, layout[0]), stored(b, layout[1]))


def worst(actual, exact, sizes):
    return float(np.max(np.abs(wide(actual) - exact) / sizes))


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0].__name__}-{pair[1].__name__}")
@pytest.mark.parametrize(
    ("m", "n", "k"), [(128, 256, 128), (1, 72, 400), (200, 136, 1000), (333, 271, 77), (64, 1, 16)]
)
def test_every_layout_and_residue(rng, m, n, k, pair, layout):
    a, b = drawn(rng, (m, k), pair[0]), drawn(rng, (k, n), pair[1])
    exact, sizes = wide(a) @ wide(b), np.abs(wide(a)) @ np.abs(wide(b)) + 1e-30
    if pair[0] == INT8:
        y = product(a, b, layout, preferred_element_type=jnp.int32)
        assert y.dtype == jnp.int32
        np.testing.assert_array_equal(np.asarray(y), exact)
        return
    y = product(a, b, layout, preferred_element_type=jnp.float32)
    fast = jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32))
    assert worst(y, exact, sizes) <= 2 * worst(fast(a, b), exact, sizes) + 4 * STEP
    y = product(a, b, layout, preferred_element_type=jnp.float32, precision="highest")
    assert worst(y, exact, sizes) <= 4 * STEP


@pytest.mark.parametrize("shape", [(4, 13, 18), (3, 16, 144), (128, 512, 4096)])
def test_integers_without_a_kernel_are_exact(rng, shape, monkeypatch):
    monkeypatch.setattr(lowering, "_call_or_reason", lambda *arguments: "by a test")
    m, n, k = shape
    a, b = drawn(rng, (m, k), INT8), drawn(rng, (k, n), INT8)
    y = product(a, b, "nn", preferred_element_type=jnp.int32)
    np.testing.assert_array_equal(np.asarray(y), wide(a) @ wide(b))


# Rows that stream their weights have their own tests.
ROWS = [row for row in kernel_table.RUN_TIME_CONFIGS if not (row.streams_b or row.gated)]


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.grouped == "none"], ids=lambda row: row.name
)
def test_every_row(rng, row):
    m, n, k = (int(rng.integers(1, 600)) for _ in range(3))
    k += row.tile_k * (row.split_k - 1)  # each block has a part
    arithmetic = row.arithmetic
    a = drawn(rng, (m, k), TYPES[arithmetic.a.tag])
    b = drawn(rng, (k, n), TYPES[arithmetic.b.tag])
    exact, sizes = wide(a) @ wide(b), np.abs(wide(a)) @ np.abs(wide(b)) + 1e-30
    is_integer = arithmetic.a.tag == "s8"
    precision = "highest" if arithmetic.promotes else None
    options = {"precision": precision, "config": row.name}
    y = product(
        *(a, b, "nt"), preferred_element_type=jnp.int32 if is_integer else jnp.float32, **options
    )
    assert worst(y, exact, sizes) <= (0 if is_integer else 8 * STEP)


@pytest.mark.parametrize("reduces", [False, True])
@pytest.mark.parametrize("batch", [(), (3,)], ids=["", "batch"])
@pytest.mark.parametrize(("m", "n"), [(1, 4096), (5, 300), (300, 5), (40, 700), (64, 64)])
def test_few_rows_or_columns_with_a_function(rng, m, n, batch, reduces):
    """Without a reduction, rows may divide the blocks of results that a function gets."""
    k = int(rng.integers(1, 2000))
    a, b = drawn(rng, (*batch, m, k), E4M3), drawn(rng, (*batch, k, n), E4M3)
    column = jnp.asarray(rng.normal(size=n), jnp.float32)
    matrix = jnp.asarray(rng.normal(size=(*batch, m, n)), BF16)

    def f(z, column, matrix):
        y = z.astype(jnp.float32) * column + matrix.astype(jnp.float32)
        return (y, y.astype(BF16), *([jnp.max(y, -1)] if reduces else []))

    got = product(a, b, "nt", epilogue=f, epilogue_operands=(column, matrix))
    exact, sizes = wide(a) @ wide(b), np.abs(wide(a)) @ np.abs(wide(b))
    wanted = exact * wide(column) + wide(matrix)
    allowed = sizes * np.abs(wide(column)) * 8 * STEP + 2.0**-22 * np.abs(wanted) + 1e-6
    assert np.all(np.abs(wide(got[0]) - wanted) <= allowed)
    assert np.all(np.abs(wide(got[1]) - wanted) <= allowed + 2.0**-8 * np.abs(wanted))
    if reduces:
        np.testing.assert_array_equal(np.asarray(got[2]), np.asarray(got[0]).max(-1))


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.grouped == "m"], ids=lambda row: row.name
)
def test_every_row_of_groups(rng, row):
    n, k = (int(rng.integers(1, 600)) for _ in range(2))
    sizes = rng.integers(0, 150, 6)
    m = int(sizes.sum()) + 50
    arithmetic = row.arithmetic
    a = drawn(rng, (m, k), TYPES[arithmetic.a.tag])
    b = drawn(rng, (6, n, k), TYPES[arithmetic.b.tag])
    is_integer = arithmetic.a.tag == "s8"
    options = {"precision": "highest" if arithmetic.promotes else None, "config": row.name}
    options["preferred_element_type"] = jnp.int32 if is_integer else jnp.float32
    run = jax.jit(lambda *x: ragged_dot(*x, transpose_rhs=True, epilogue=lambda z: z, **options))
    y = run(a, b, jnp.asarray(sizes, jnp.int32))
    ends = np.cumsum(sizes)
    for group, (begin, end) in enumerate(zip(ends - sizes, ends, strict=True)):
        x, w = wide(a)[begin:end], wide(b)[group].T
        if begin < end:
            bound = 0 if is_integer else 8 * STEP
            assert worst(y[begin:end], x @ w, np.abs(x) @ np.abs(w) + 1e-30) <= bound
    assert not wide(y)[ends[-1] :].any()


def test_sums_that_are_promoted_do_not_lose_more_for_a_long_k(rng):
    options = {"preferred_element_type": jnp.float32, "precision": "highest"}

    def loss(k):
        positive = (jnp.abs(drawn(rng, s, E4M3).astype(jnp.float32)) for s in ((128, k), (k, 128)))
        a, b = (x.astype(E4M3) for x in positive)
        exact = wide(a) @ wide(b)
        return worst(product(a, b, "nt", **options), exact, exact)

    # Truncation is always towards zero, so it adds up if all numbers are positive. Each of the 4
    # instructions of a stage truncates its sum and 32 products at 14 bits.
    short, long = loss(128), loss(65536)
    assert short <= 4 * 33 * STEP / 2
    assert long <= 1.2 * short


@pytest.mark.parametrize("shape", ["tensor", "rows", "columns", "both", "blocks of rows"])
@pytest.mark.parametrize("layout", ["nt", "tn"])
@pytest.mark.parametrize("dtype", [E4M3, INT8], ids=lambda dtype: dtype.__name__)
def test_scales_that_do_not_move_along_k(rng, dtype, layout, shape):
    m, n, k = 192, 320, 512
    a, b = drawn(rng, (m, k), dtype), drawn(rng, (k, n), dtype)
    shapes = {
        "tensor": ((), (1, 1)),
        "rows": ((m, 1), ()),
        "columns": ((), (1, n)),
        "both": ((m, 1), (1, n)),
        "blocks of rows": ((3, 1), (1, 5)),
    }[shape]
    of_a, of_b = (jnp.asarray(rng.uniform(0.5, 2, size), jnp.float32) for size in shapes)
    y = product(
        *(a, b, layout),
        a_scale=stored(of_a, layout[0]) if of_a.ndim else of_a,
        b_scale=stored(of_b, layout[1]) if of_b.ndim else of_b,
        preferred_element_type=jnp.float32,
        precision="highest",
    )
    scale_a = np.repeat(wide(of_a), m // of_a.shape[0], 0) if of_a.ndim else wide(of_a)
    scale_b = np.repeat(wide(of_b), n // of_b.shape[1], 1) if of_b.ndim else wide(of_b)
    exact = (wide(a) * scale_a) @ (wide(b) * scale_b)
    sizes = (np.abs(wide(a)) * scale_a) @ (np.abs(wide(b)) * scale_b)
    assert worst(y, exact, sizes) <= 4 * STEP


@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
@pytest.mark.parametrize(("m", "n", "k"), [(128, 128, 128), (200, 384, 640), (17, 256, 2048)])
@pytest.mark.parametrize("batch", [(), (3,)], ids=["", "batch"])
def test_scales_by_blocks(rng, batch, m, n, k, layout):
    a, b = drawn(rng, (*batch, m, k), E4M3), drawn(rng, (*batch, k, n), E4M3)
    of_a = jnp.asarray(rng.uniform(0.5, 2, (*batch, m, k // 128)), jnp.float32)
    of_b = jnp.asarray(rng.uniform(0.5, 2, (*batch, k // 128, n // 128)), jnp.float32)
    scales = {"a_scale": stored(of_a, layout[0]), "b_scale": stored(of_b, layout[1])}
    y = product(a, b, layout, preferred_element_type=jnp.float32, **scales)
    every = np.repeat(wide(of_a), 128, -1), np.repeat(np.repeat(wide(of_b), 128, -1), 128, -2)
    exact = (wide(a) * every[0]) @ (wide(b) * every[1])
    sizes = (np.abs(wide(a)) * every[0]) @ (np.abs(wide(b)) * every[1])
    assert worst(y, exact, sizes) <= 4 * STEP


def test_one_weight_with_scales_by_blocks_for_many_rows(rng):
    x, w = drawn(rng, (2, 5, 64, 256), E4M3), drawn(rng, (256, 128), E4M3)
    of_x = jnp.asarray(rng.uniform(0.5, 2, (2, 5, 64, 2)), jnp.float32)
    of_w = jnp.asarray(rng.uniform(0.5, 2, (2, 1)), jnp.float32)
    y = jax.jit(gemm)(x, w, a_scale=of_x, b_scale=of_w)
    exact = (wide(x) * np.repeat(wide(of_x), 128, -1)) @ (wide(w) * np.repeat(wide(of_w), 128, 0))
    assert np.max(np.abs(wide(y) - exact)) < 2**-7 * np.max(np.abs(exact))


@pytest.mark.parametrize("out", [E4M3, E5M2, INT8], ids=lambda dtype: dtype.__name__)
def test_a_result_of_8_bits_with_its_largest_value(rng, out):
    m, n, k = 200, 272, 384
    a, b = drawn(rng, (m, k), E4M3), drawn(rng, (k, n), E4M3)
    bias = jnp.asarray(rng.normal(size=n), jnp.float32)
    of_a, of_b, of_d = 0.5, jnp.asarray(rng.uniform(0.5, 2, (1, n)), jnp.float32), 0.25

    def formula(z):
        y = jax.nn.gelu(z * 0.5 * of_b + bias)
        limits = jnp.iinfo(out) if out == INT8 else jnp.finfo(out)
        q = y * 4
        q = jnp.clip(jnp.round(q) if out == INT8 else q, float(limits.min), float(limits.max))
        return q.astype(out), jnp.max(jnp.abs(y))

    d, amax = product(
        *(a, b, "nt"),
        a_scale=jnp.float32(of_a),
        b_scale=of_b.T,
        bias=bias,
        activation="gelu",
        out_scale=jnp.float32(of_d),
        return_amax=True,
        preferred_element_type=out,
        precision="highest",
    )
    exact = jnp.asarray(wide(a) @ wide(b), jnp.float32)
    expected, largest = formula(exact)
    assert (d.dtype, amax.dtype) == (out, jnp.float32)
    assert abs(float(amax) - float(largest)) < 1e-3 * float(largest)
    steps = np.abs(wide(d) - wide(expected)) / (np.abs(wide(expected)) + 1)
    assert steps.max() <= (1 if out == INT8 else 2**-2)
    assert (steps > 0).mean() < 0.02  # sums close to a midpoint of two numbers


def test_batches_and_a_broadcast_operand(rng):
    a, b = drawn(rng, (2, 3, 96, 160), E4M3), drawn(rng, (3, 160, 80), E5M2)
    y = jax.jit(lambda a, b: gemm(a, b, preferred_element_type=jnp.float32))(a, b)
    exact, sizes = wide(a) @ wide(b), np.abs(wide(a)) @ np.abs(wide(b))
    assert worst(y, exact, sizes) <= 8 * STEP


def test_vmap_of_products_with_scales(rng):
    a, b = drawn(rng, (4, 72, 128), E4M3), drawn(rng, (128, 128), E4M3)
    scale = jnp.asarray(rng.uniform(0.5, 2, 4), jnp.float32)
    one = lambda a, s: gemm(a, b, a_scale=s, preferred_element_type=jnp.float32)  # noqa: E731
    y = jax.jit(jax.vmap(one))(a, scale)
    factor = wide(scale)[:, None, None]
    exact, sizes = wide(a) @ wide(b) * factor, np.abs(wide(a)) @ np.abs(wide(b)) * factor
    assert worst(y, exact, sizes) <= 8 * STEP


@pytest.mark.parametrize("is_transposed", [False, True])
def test_two_weights(rng, is_transposed):
    x, gate, up = (drawn(rng, s, E4M3) for s in ((200, 256), (256, 192), (256, 192)))
    weights = [w.T if is_transposed else w for w in (gate, up)]

    def join(g, u):
        return (jax.nn.silu(g / 16) * (u / 16)).astype(BF16)

    y = jax.jit(lambda x, *w: gated_gemm(x, *w, transpose_w=is_transposed, epilogue=join))(
        x, *weights
    )
    expected = join(*(jnp.asarray(wide(x) @ wide(w), jnp.float32) for w in (gate, up)))
    assert np.max(np.abs(wide(y) - wide(expected))) < 2**-6 * np.max(np.abs(wide(expected)))


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("precision", [None, "highest"])
def test_groups_of_rows(rng, is_transposed, precision):
    x, w = drawn(rng, (300, 256), E4M3), drawn(rng, (4, 256, 192), E4M3)
    sizes = jnp.asarray([100, 0, 170, 20], jnp.int32)
    scale = jnp.asarray(rng.uniform(0.5, 2, (300, 1)), jnp.float32)
    y = jax.jit(
        lambda x, w, s: ragged_dot(
            *(x, w, sizes),
            transpose_rhs=is_transposed,
            precision=precision,
            preferred_element_type=jnp.float32,
            epilogue=lambda acc, s: acc * s,
            epilogue_operands=(s,),
        )
    )(x, jnp.swapaxes(w, 1, 2) if is_transposed else w, scale)
    group = np.repeat(np.arange(4), [100, 0, 170, 20])
    exact = np.einsum("mk,mkn->mn", wide(x)[:290], wide(w)[group]) * wide(scale)[:290]
    assert np.max(np.abs(wide(y)[:290] - exact)) < 2**-9 * np.max(np.abs(exact))
    assert not wide(y)[290:].any()


@pytest.mark.parametrize("shape", [(1, 1), (16, 16), (77, 130), (128, 256), (1000, 33), (640, 384)])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_bytes_are_transposed(rng, shape, batch):
    x = jnp.asarray(rng.integers(-128, 128, (*batch, *shape)), jnp.int8)
    rank = len(batch)
    factor = operand_layout.Factor(x.shape, tuple(range(rank)), rank + 1, rank)
    y = jax.jit(factor.made)(x)
    k = operand_layout.filled_up(shape[0])
    assert y.shape == (*batch, shape[1], k)
    np.testing.assert_array_equal(y[..., : shape[0]], jnp.swapaxes(x, -1, -2))
    assert not y[..., shape[0] :].any()
