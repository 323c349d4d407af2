"""User functions in every row of the kernel table that takes them, on a Hopper GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tcgemm import _core, gemm
from jax_tcgemm.kernels import table

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.usefixtures("never_apart")]

_ROWS = [row for row in table.CONFIGS if _core.row_facts(row.name).takes_functions]
_PLAIN = [row.name for row in _ROWS if not (row.gated or row.grouped != "none")]
_LAYOUTS = ("nn", "nt", "tn", "tt")
_DTYPES = {"bf16": jnp.bfloat16, "f16": jnp.float16, "tf32": jnp.float32}


def _everything(z, scalar, row, column, matrix, wide, odd):
    y = jax.nn.gelu(z * scalar + row) * column + matrix.astype(jnp.float32)
    return {
        "y": y,
        "half": (y + wide).astype(jnp.bfloat16),
        "sign": jnp.sign(z + odd).astype(jnp.int8),
        "rows": y.sum(-1),
        "columns": y.max(0),
        "all": jnp.abs(y).max(),
        "place": (jax.lax.broadcasted_iota(jnp.int32, y.shape, 0) * 1000)
        + jax.lax.broadcasted_iota(jnp.int32, y.shape, 1),
    }


def _little(z, scalar, row, column, *_):
    y = jax.nn.gelu(z * scalar + row) * column
    return {"y": y.astype(jnp.bfloat16), "rows": y.sum(-1), "columns": y.max(0)}


def _no_reduction(*operands):
    results = _everything(*operands)
    return {name: results[name] for name in ("y", "half", "sign", "place")}


def _function_for(row):
    """Returns a function that the row can compute, and for which it has shared memory."""
    facts = _core.row_facts(row.name)
    if not facts.takes_reductions:
        return _no_reduction
    has_room = row.skinny or facts.warp_buffer_bytes >= 4096
    return _little if row.tile_m == 192 or not has_room else _everything


def _operands(rng, m, n, k, layout, dtype):
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    # Few bits, so that the product is exact in any arithmetic and any order.
    few = lambda *shape: rng.integers(-4, 5, shape) / 4  # noqa: E731
    a, b = few(m, k), few(k, n) / 8
    product = jnp.asarray(a @ b, jnp.float32)
    a, b = jnp.asarray(a, dtype), jnp.asarray(b, dtype)
    factors = a.T if layout[0] == "t" else a, b.T if layout[1] == "t" else b
    others = (
        jnp.float32(1.5),
        jnp.asarray(draw(n)),
        jnp.asarray(draw(m, 1)),
        jnp.asarray(draw(m, n), jnp.bfloat16),
        jnp.asarray(draw(m, n)),
        jnp.asarray(draw(n, m)).T,
    )
    return factors, others, product


def _run(function, factors, others, layout, config):
    transposed = {"transpose_a": layout[0] == "t", "transpose_b": layout[1] == "t"}
    return jax.jit(
        lambda a, b, *x: gemm(
            a, b, epilogue=function, epilogue_operands=x, config=config, **transposed
        )
    )(*factors, *others)


def _check(got, expected):
    for name, y in expected.items():
        x = got[name]
        assert (x.dtype, x.shape) == (y.dtype, y.shape), name
        if jnp.issubdtype(x.dtype, jnp.integer):
            np.testing.assert_array_equal(x, y, err_msg=name)
        else:
            rtol, atol = (1e-5, 1e-5) if x.dtype == jnp.float32 else (2**-7, 2**-7)
            x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
            np.testing.assert_allclose(x, y, rtol, atol * max(1.0, np.abs(y).max()), err_msg=name)


def _extents(row, rng):
    """Draws extents with incomplete tiles; few rows or few columns for a skinny row."""
    m, n = (8 * int(x) for x in rng.integers(9, 60, 2))
    if row.skinny:
        few = int(rng.integers(1, 65))
        m, n = (few, n) if rng.random() < 0.6 else (m, 8 * -(-few // 8))
    return m, n, 8 * int(rng.integers(16, 40)) * (2 if row.skinny else 1)


@pytest.mark.parametrize("name", _PLAIN)
def test_every_row(rng, name):
    row = table.BY_NAME[name]
    for layout in _LAYOUTS:
        if row.swap_ab and layout[0] == "t":
            continue
        m, n, k = _extents(row, rng)
        if layout[0] == "t":
            m = -(-m // 8) * 8
        factors, others, product = _operands(rng, m, n, k, layout, _DTYPES[row.tag])
        function = _function_for(row)
        got = _run(function, factors, others, layout, name)
        _check(got, jax.jit(function)(product, *others))


_ADDING = [name for name in _PLAIN if _core.row_facts(name).adds_parts]


@pytest.mark.parametrize("name", _ADDING)
@pytest.mark.parametrize("splits", [2, 3, 4])
def test_rows_whose_blocks_add_up_parts_of_k(rng, name, splits):
    """Products are exact in any order, so the results have no error but the function's."""
    row = table.BY_NAME[name]
    layout = str(rng.choice(_LAYOUTS))
    m, n = (8 * int(x) for x in rng.integers(9, 50, 2))
    k = 8 * int(rng.integers(130, 400))
    factors, others, product = _operands(rng, m, n, k, layout, _DTYPES[row.tag])
    function = _function_for(row)
    config = f"{name}/splits={splits}"
    expected = jax.jit(function)(product, *others)
    for _ in range(3):  # flags of one launch are cleared for the next
        _check(_run(function, factors, others, layout, config), expected)


def test_reductions_have_the_same_bits_in_all_rows(rng):
    m, n, k = 304, 272, 256

    def f(z, r):
        y = z + r
        return y, y.sum(0), y.sum(1), y.sum()

    b = jnp.asarray(rng.normal(size=(k, n)), jnp.bfloat16)
    a, r = (jnp.asarray(rng.normal(size=(m, x)), jnp.bfloat16) for x in (k, n))
    # The instructions of a family add in one order; rows that promote add in another one.
    results = {}
    for name in _PLAIN:
        row = table.BY_NAME[name]
        if row.tag == "bf16" and not row.skinny:
            run = jax.jit(lambda a, b, r, name=name: gemm(
                a, b, epilogue=f, epilogue_operands=(r,), config=name))  # fmt: skip
            found = jax.tree.map(np.asarray, run(a, b, r))
            results.setdefault((row.arch, row.promote), {})[name] = found
    assert any("swap_ab" in name for name in results["sm90", False])
    assert len(results["sm80", False]) > 1
    for alike in results.values():
        first = next(iter(alike.values()))
        for name, found in alike.items():
            for x, y in zip(found, first, strict=True):
                np.testing.assert_array_equal(x, y, err_msg=name)


@pytest.mark.parametrize("name", _PLAIN)
def test_odd_columns(rng, name):
    """Rows of D that begin at any byte; only a B with contiguous k has them."""
    row = table.BY_NAME[name]
    m, n, k = _extents(row, rng)
    n = 1 + 2 * int(rng.integers(36, 60)) if m <= 64 or not row.skinny else 1 + n // 2 * 2 % 63
    factors, others, product = _operands(rng, m, n, k, "nt", _DTYPES[row.tag])
    function = _function_for(row)
    got = _run(function, factors, others, "nt", name)
    _check(got, jax.jit(function)(product, *others))


@pytest.mark.parametrize(("m", "n"), [(1, 4096), (16, 8192), (40, 8192), (64, 14336), (512, 24)])
def test_few_rows_have_accurate_sums(rng, m, n):
    k = 4096
    a = jnp.asarray(rng.normal(size=(m, k)), jnp.bfloat16)
    b = jnp.asarray(rng.normal(size=(k, n)), jnp.bfloat16)
    exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    got = jax.jit(lambda a, b: gemm(a, b, epilogue=lambda z: 2 * z))(a, b) / 2
    plain = jnp.matmul(a, b, preferred_element_type=jnp.float32)
    error, theirs = (np.abs(np.asarray(x, np.float64) - exact).max() for x in (got, plain))
    assert error <= 2 * theirs + 2**-23 * np.abs(exact).max()
    # Tensor cores that truncate the sum over all of k lose 2**-17.6.
    assert error <= 2**-19 * np.abs(exact).max()


def test_batches_of_few_rows(rng):
    a = jnp.asarray(rng.normal(size=(3, 7, 256)), jnp.bfloat16)
    b = jnp.asarray(rng.normal(size=(3, 256, 192)) / 16, jnp.bfloat16)
    bias = jnp.asarray(rng.normal(size=(3, 1, 192)), jnp.bfloat16)
    f = lambda z, c: (jax.nn.silu(z + c).astype(jnp.bfloat16), z.max(-1))  # noqa: E731
    got = jax.jit(lambda a, b, c: gemm(a, b, epilogue=f, epilogue_operands=(c,)))(a, b, bias)
    product = jnp.matmul(a, b, preferred_element_type=jnp.float32)
    for x, y in zip(got, f(product, bias), strict=True):
        np.testing.assert_allclose(
            np.asarray(x, np.float32), np.asarray(y, np.float32), 2**-7, 2**-7
        )


def test_one_row_of_each_batch(rng):
    a = jnp.asarray(rng.normal(size=(8, 1, 512)), jnp.bfloat16)
    b = jnp.asarray(rng.normal(size=(512, 1024)) / 16, jnp.bfloat16)
    r, s = (jnp.asarray(rng.normal(size=(8, 1, n)), jnp.bfloat16) for n in (1024, 1))
    f = lambda z, r, s: (jnp.tanh(z * s) + r).astype(jnp.bfloat16)  # noqa: E731
    got = jax.jit(lambda *x: gemm(*x[:2], epilogue=f, epilogue_operands=x[2:]))(a, b, r, s)
    expected = f(jnp.matmul(a, b, preferred_element_type=jnp.float32), r, s)
    np.testing.assert_allclose(
        np.asarray(got, np.float32), np.asarray(expected, np.float32), 2**-7, 2**-7
    )


@pytest.mark.parametrize(("m", "tag"), [(1, "bf16"), (16, "bf16"), (33, "f16"), (200, "tf32")])
def test_gradients(rng, m, tag):
    dtype = _DTYPES[tag]
    a = jnp.asarray(rng.normal(size=(m, 512)), dtype)
    b = jnp.asarray(rng.normal(size=(512, 1024)) / 16, dtype)
    r = jnp.asarray(rng.normal(size=(m, 1024)), dtype)
    f = lambda z, r: (jax.nn.mish(z) * jax.nn.sigmoid(r)).astype(dtype)  # noqa: E731

    def ours(a, b, r):
        return gemm(a, b, epilogue=f, epilogue_operands=(r,)).astype(jnp.float32).sum()

    def theirs(a, b, r):
        z = jnp.matmul(a, b, preferred_element_type=jnp.float32)
        return f(z, r).astype(jnp.float32).sum()

    got, expected = (jax.jit(jax.grad(x, (0, 1, 2)))(a, b, r) for x in (ours, theirs))
    for x, y in zip(got, expected, strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        assert np.linalg.norm(x - y) <= 2**-6 * np.linalg.norm(y)
