"""Functions of products with packed weights on a Hopper GPU, compared with ``jax.numpy``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_accuracy import poison
from packed_problems import FLOATS, exact_weight
from packed_values import QTYPES, weight, wide

from jax_tcgemm import Quantized, _extension, gated_gemm, gemm, pack
from jax_tcgemm.kernels import packed as kernels

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

DRAWN = 48
FORMATS = [*((qtype, False) for qtype in QTYPES), ("int4", True), ("uint4", True)]
ROWS = [1, 8, 16, 30, 64, 100, 300]


def draw(rng, shape, n, k, group, qtype="int4", has_zeros=False, dtype="bfloat16", count=1):
    """Returns x and quantized weights, with products of about 1."""
    made = []
    for _ in range(count):
        q = weight(rng, qtype, (k, n), group, has_zeros=has_zeros, scale_dtype="float32")
        size = np.abs(exact_weight(q)).mean() * k**0.5
        made.append(Quantized(q.qvalue, (q.scale / size).astype(dtype), q.zero_point, q.qtype))
    return jnp.asarray(rng.normal(size=(*shape, k)), dtype), made


def run(function, *operands):
    """Compiles a function, which must become one kernel, and runs it."""
    compiled = jax.jit(function)
    text = compiled.lower(*operands).as_text()
    assert text.count(f"@{_extension.PACKED_FUNCTION_TARGET}(") == 1
    assert f"@{_extension.PACKED_TARGET}(" not in text
    poison(operands[0].shape, "float32")
    return compiled(*operands)


def products(x, quantized):
    """Returns the products in float64 and the size of an error of each."""
    a = np.asarray(x, np.float64)
    made = [(a @ exact_weight(q), np.abs(a) @ np.abs(exact_weight(q))) for q in quantized]
    return [z for z, _ in made], max(size.max() for _, size in made)


def near(got, wanted, size, slope=1.0):
    """Compares with a tolerance for products whose weights were rounded once more."""
    allowed = slope * size * 2.0**-8 + 2.0**-7 * (1 + np.abs(wanted))
    assert np.all(np.abs(np.asarray(got, np.float64) - wanted) <= allowed)


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize(("qtype", "has_zeros"), FORMATS)
def test_one_weight(rng, qtype, has_zeros, m):
    n, k = int(rng.integers(1, 300)), 128 * int(rng.integers(1, 8))
    x, [q] = draw(rng, (m,), n, k, int(rng.choice([32, 64, 128])), qtype, has_zeros)
    r = jnp.asarray(rng.normal(size=(m, n)), str(rng.choice(FLOATS)))
    bias = jnp.asarray(rng.normal(size=n), "bfloat16")
    out = str(rng.choice(FLOATS))
    got = run(
        lambda x, p, r, bias: gemm(
            x, p, residual=r, bias=bias, activation="relu", preferred_element_type=out
        ),
        *(x, pack(q), r, bias),
    )
    assert got.dtype == jnp.dtype(out)
    (z,), size = products(x, [q])
    near(got, np.maximum(z + wide(bias), 0) + wide(r), size)


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize(("qtype", "has_zeros"), FORMATS)
def test_two_weights(rng, qtype, has_zeros, m):
    n, k = int(rng.integers(1, 300)), 128 * int(rng.integers(1, 8))
    group = int(rng.choice([32, 64, 128]))
    x, q = draw(rng, (m,), n, k, group, qtype, has_zeros, count=2)
    got = run(lambda x, p, u: gated_gemm(x, p, u, activation="tanh"), x, *map(pack, q))
    (z, y), size = products(x, q)
    near(got, np.tanh(z) * y, size, slope=1 + np.abs(y).max())


@pytest.mark.parametrize("m", [5, 40])
def test_parts_of_k(rng, monkeypatch, m):
    monkeypatch.setattr(kernels, "_LEAST_K", 256)
    x, q = draw(rng, (m,), 100, 2048, 64, count=2)
    row = kernels.choose_pair(4, m, 100, 2048, 64)
    assert row is not None
    assert row.split_k > 1
    got = run(lambda x, p, u: gated_gemm(x, p, u, activation=None), x, *map(pack, q))
    (z, y), size = products(x, q)
    near(got, z * y, size, slope=np.abs(y).max() + np.abs(z).max())


@pytest.mark.parametrize("n", [64, 100, 7])
def test_several_results_and_operands(rng, n):
    x, [q] = draw(rng, (2, 5), n, 256, 64, "uint4", True)
    row, column = jnp.asarray(rng.normal(size=(2, 5, 1)), "float32"), jnp.arange(n) / n
    factor = jnp.float32(1.5)

    def f(x, p, *operands):
        return gemm(
            x,
            p,
            epilogue=lambda z, r, c, s: (z * r + c, (z > s), (z * 8).astype(jnp.int8), jnp.sin(z)),
            epilogue_operands=operands,
        )

    got = run(f, x, pack(q), row, column, factor)
    (z,), size = products(x, [q])
    near(got[0], z * np.asarray(row) + np.asarray(column), size, slope=np.abs(row).max())
    near(got[3], np.sin(z), size)
    assert got[1].dtype == bool
    clear = np.abs(z - 1.5) > 0.05
    np.testing.assert_array_equal(np.asarray(got[1])[clear], (z > 1.5)[clear])
    assert got[2].dtype == jnp.int8
    assert np.all(np.abs(np.asarray(got[2], np.float64) - np.clip(8 * z, -128, 127)) <= 1.5)


@pytest.mark.parametrize("index", range(DRAWN))
def test_drawn(rng, index):
    del index
    m, n = int(rng.integers(1, 200)), int(rng.integers(1, 400))
    k = 64 * int(rng.integers(1, 16))
    group = int(rng.choice([each for each in (32, 64, 128, k) if k % each == 0]))
    qtype, dtype = str(rng.choice(QTYPES)), str(rng.choice(FLOATS[:2]))
    has_zeros = qtype.endswith("int4") and bool(rng.integers(2))
    count = int(rng.integers(1, 3))
    x, q = draw(rng, (m,), n, k, group, qtype, has_zeros, dtype, count)
    r = jnp.asarray(rng.normal(size=(m, n)), dtype)

    def f(x, r, *weights):
        if count == 1:
            return gemm(x, *weights, residual=r, preferred_element_type="float32")
        function = lambda g, u, r: g * 0.5 + u + r  # noqa: E731
        return gated_gemm(x, *weights, epilogue=function, epilogue_operands=[r])

    got = run(f, x, r, *map(pack, q))
    z, size = products(x, q)
    near(got, (z[0] * 0.5 + z[1] if count == 2 else z[0]) + wide(r), 2 * size)


def test_cuda_graphs_and_scan(rng):
    x, [q] = draw(rng, (4,), 256, 256, 64)

    def f(x, p):
        return jax.lax.scan(lambda x, _: (gemm(x, p, residual=x) * 0.5, None), x, length=20)[0]

    once = jax.jit(f)(x, pack(q))
    np.testing.assert_array_equal(wide(once), wide(jax.jit(f)(x, pack(q))))
    wanted = wide(x)
    w = exact_weight(q)
    for _ in range(20):
        wanted = 0.5 * (wanted + wanted @ w)
    np.testing.assert_allclose(wide(once), wanted, atol=0.1 * np.abs(wanted).max())
