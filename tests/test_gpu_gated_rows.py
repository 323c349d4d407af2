"""Functions of two products in every row for two weights, on a Hopper GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tcgemm import _core, fuse, gated_gemm
from jax_tcgemm.kernels import table

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.usefixtures("never_apart")]

_ROWS = [row for row in table.CONFIGS if row.gated and _core.row_facts(row.name).takes_functions]
_DTYPES = {"bf16": jnp.bfloat16, "f16": jnp.float16}


def _function(gate, up, row, column, matrix):
    y = jax.nn.silu(gate + row) * up * column + matrix.astype(jnp.float32)
    place = jax.lax.broadcasted_iota(jnp.int32, y.shape, 0) * 1000
    place += jax.lax.broadcasted_iota(jnp.int32, y.shape, 1)
    return {"y": y.astype(jnp.bfloat16), "both": gate + 2 * up, "place": place}


def _reduced(*operands):
    results = _function(*operands)
    y = operands[0] * operands[1]
    return results | {"rows": y.sum(-1), "columns": y.max(0), "all": jnp.abs(y).max()}


def _drawn(rng, batch, m, n, k, transpose_w, dtype):
    """Draws factors with few bits, whose products are exact in any order, and other operands."""
    few = lambda *shape: rng.integers(-4, 5, shape) / 4  # noqa: E731
    a, v, w = few(*batch, m, k), few(*batch, k, n) / 8, few(*batch, k, n) / 8
    products = [jnp.asarray(a @ x, jnp.float32) for x in (v, w)]
    a, v, w = (jnp.asarray(x, dtype) for x in (a, v, w))
    factors = a, *(x.mT.copy() if transpose_w else x for x in (v, w))
    others = (
        jnp.asarray(rng.normal(size=(*batch, 1, n)), jnp.float32),
        jnp.asarray(rng.normal(size=(*batch, m, 1)), jnp.float32),
        jnp.asarray(rng.normal(size=(*batch, m, n)), jnp.bfloat16),
    )
    return factors, others, products


def _run(function, factors, others, **options):
    return jax.jit(
        lambda a, v, w, *x: gated_gemm(a, v, w, epilogue=function, epilogue_operands=x, **options)
    )(*factors, *others)


def _check(got, expected):
    for name, y in expected.items():
        x = got[name]
        assert (x.dtype, x.shape) == (y.dtype, y.shape), name
        if name in ("both", "place"):
            np.testing.assert_array_equal(x, y, err_msg=name)
        else:
            rtol = 1e-5 if x.dtype == jnp.float32 else 2**-7
            x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
            np.testing.assert_allclose(x, y, rtol, rtol * max(1, np.abs(y).max()), err_msg=name)


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("name", [row.name for row in _ROWS])
def test_every_row(rng, name, batch):
    row = table.BY_NAME[name]
    function = _reduced if _core.row_facts(name).takes_reductions else _function
    for transpose_w in (False, True):
        m = int(rng.integers(1, 65)) if row.skinny else int(rng.integers(65, 300))
        n, k = 8 * int(rng.integers(9, 60)), 8 * int(rng.integers(32, 80))
        factors, others, products = _drawn(rng, batch, m, n, k, transpose_w, _DTYPES[row.tag])
        got = _run(function, factors, others, config=name, transpose_w=transpose_w)
        _check(got, jax.jit(function)(*products, *others))


@pytest.mark.parametrize("m", [1, 2, 9, 16, 17, 33, 64])
@pytest.mark.parametrize(("n", "k"), [(1000, 520), (4096, 4096), (200, 16384), (28672, 1536)])
def test_few_rows(rng, m, n, k):
    """The default choice, and a wide result: its error is at most that of the plain products."""
    x = jnp.asarray(rng.normal(size=(m, k)), jnp.bfloat16)
    v, w = (jnp.asarray(rng.normal(size=(k, n)) / np.sqrt(k), jnp.bfloat16) for _ in range(2))
    both = jax.jit(lambda *x: gated_gemm(*x, epilogue=lambda gate, up: (gate, up)))(x, v, w)
    for got, weight in zip(both, (v, w), strict=True):
        exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
        plain = jnp.matmul(x, weight, preferred_element_type=jnp.float32)
        error, theirs = (np.abs(np.asarray(y, np.float64) - exact).max() for y in (got, plain))
        assert error <= 2 * theirs + 2**-23 * np.abs(exact).max()


@pytest.mark.parametrize("bias", [False, True])
def test_named_activations_and_gradients(rng, bias):
    x = jnp.asarray(rng.normal(size=(16, 1024)), jnp.bfloat16)
    v, w = (jnp.asarray(rng.normal(size=(1024, 2048)) / 32, jnp.bfloat16) for _ in range(2))
    biases = [jnp.asarray(rng.normal(size=2048), jnp.bfloat16) for _ in range(2 * bias)]
    names = dict(zip(("bias_gate", "bias_up"), biases, strict=False))

    def ours(x, v, w):
        return gated_gemm(x, v, w, activation="silu", **names)

    assert "compiled_gemm" in jax.jit(ours).lower(x, v, w).as_text()

    def theirs(x, v, w):
        products = [jnp.matmul(x, y, preferred_element_type=jnp.float32) for y in (v, w)]
        gate, up = [y + z for y, z in zip(products, biases, strict=True)] if bias else products
        return (jax.nn.silu(gate) * up).astype(jnp.bfloat16)

    def gradient(f):
        return jax.jit(jax.grad(lambda *y: f(*y).astype(jnp.float32).sum(), (0, 1, 2)))(x, v, w)

    pairs = [
        (jax.jit(ours)(x, v, w), theirs(x, v, w)),
        *zip(*map(gradient, (ours, theirs)), strict=True),
    ]
    for got, expected in pairs:
        got, expected = (np.asarray(y, np.float32) for y in (got, expected))
        assert np.linalg.norm(got - expected) <= 2**-6 * np.linalg.norm(expected)


@pytest.mark.parametrize("batch", [(), (5,)])
def test_one_array_with_both_weights(rng, batch):
    """The second weight begins within the rows of the first one; a batch shares both."""
    m, n, k = 12, 1048, 520
    factors, others, products = _drawn(rng, batch, m, n, k, False, jnp.bfloat16)
    x, v, w = factors
    if batch:
        v, w = v[0], w[0]
        products = [jnp.matmul(x, y, preferred_element_type=jnp.float32) for y in (v, w)]
    both = jnp.concatenate([v, w], -1)
    got = jax.jit(lambda x, both, *y: gated_gemm(x, both, epilogue=_function, epilogue_operands=y))(
        x, both, *others
    )
    _check(got, jax.jit(_function)(*products, *others))


def test_a_decode_step_of_a_gated_layer(rng):
    x = jnp.asarray(rng.normal(size=(16, 1, 1024)), jnp.bfloat16)
    v, w = (jnp.asarray(rng.normal(size=(1024, 4096)) / 32, jnp.bfloat16) for _ in range(2))
    d = jnp.asarray(rng.normal(size=(4096, 1024)) / 64, jnp.bfloat16)

    def layer(x):
        return x + (jax.nn.silu(x @ v) * (x @ w)) @ d

    got, plain = (np.asarray(jax.jit(f)(x), np.float32) for f in (fuse(layer), layer))
    assert np.linalg.norm(got - plain) <= 2**-6 * np.linalg.norm(plain)


@pytest.mark.parametrize("activation", [None, "silu", "function"])
@pytest.mark.parametrize(("m", "n"), [(48, 48), (48, 1000), (768, 64), (300, 1000), (300, 72)])
def test_float32_results_have_accurate_sums(rng, m, n, activation):
    k = 4096
    a = jnp.asarray(rng.normal(size=(m, k)), jnp.bfloat16)
    v, w = (jnp.asarray(rng.normal(size=(k, n)) / 64, jnp.bfloat16) for _ in range(2))
    if activation == "function":
        if n <= 64 or m == n:
            pytest.skip("no kernel for few columns takes functions")
        options = {"epilogue": lambda gate, up: gate * up}
    else:
        options = {"activation": activation, "preferred_element_type": jnp.float32}
    got = jax.jit(lambda *x: gated_gemm(*x, **options))(a, v, w)

    def formula(numpy, gate, up):
        return (gate / (1 + numpy.exp(-gate)) if activation == "silu" else gate) * up

    sums = [jnp.matmul(a, x, preferred_element_type=jnp.float32) for x in (v, w)]
    of_xla = formula(jnp, *sums)
    exact = formula(np, *(np.asarray(a, np.float64) @ np.asarray(x, np.float64) for x in (v, w)))
    error, theirs = (np.abs(np.asarray(x, np.float64) - exact).max() for x in (got, of_xla))
    assert error <= 2 * theirs + 2**-23 * np.abs(exact).max()
    # Tensor cores that truncate the sums over all of k lose 2**-17.
    assert error <= 2**-19 * np.abs(exact).max()
