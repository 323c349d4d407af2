"""Fallback kernels on any GPU: they run where nothing else computes a product.

test_gpu_layers.py and test_gpu_ragged.py also test each row of the table.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_accuracy import in_float64, poison
from kernel_rows import by_config
from ragged_problems import BF16, F16, F32, bounds, contracted, looped

from jax_tcgemm import gated_gemm, ragged_dot
from jax_tcgemm.kernels.table import CONFIGS
from jax_tcgemm.lowering import devices, fallback, ragged_reference
from jax_tcgemm.lowering import ragged as ragged_lowering
from jax_tcgemm.primitives import gemm as gemm_primitive
from jax_tcgemm.problem import ragged
from jax_tcgemm.problem.arithmetic import INPUT_DTYPES
from jax_tcgemm.problem.epilogue import Epilogue
from jax_tcgemm.problem.strides import Operands

pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize("dtype", [BF16, F16])
PRECISION = (jax.lax.Precision.DEFAULT,) * 2

# Group sizes that fit, with empty groups; fewer than the 57 rows; more; negative; all empty; one
# group has all rows.
SIZES = [
    [20, 0, 30, 7, 0],
    [0, 3, 0, 0, 5],
    [30, 0, 30, 30, 4],
    [-5, 40, -(2**31), 2, 2**31 - 1],
    [0, 0, 0, 0, 0],
    [2**31 - 1] * 5,
]


def fallbacks(grouped):
    """Returns the mark of `by_config`, for fallback rows only."""
    mark = by_config(grouped=grouped)
    names = {row.name for row in CONFIGS if row.is_fallback}
    return pytest.mark.parametrize("config", [p for p in mark.args[1] if p.id in names])


def order(k, largest):
    """Returns the tolerance of float32 sums in another order."""
    return float(jnp.finfo(F32).eps) * k**0.5 * float(largest)


@pytest.mark.parametrize("out", ["operands'", "float32"])
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("transposed", [False, True])
@fallbacks("m")
def test_groups_of_rows(normal, assert_accurate, config, transposed, activation, out):
    dtype = jnp.dtype(INPUT_DTYPES[config.algorithm])
    out_dtype = dtype if out == "operands'" else jnp.dtype(F32)
    m, n, k = 57, 40, 72
    lhs, rhs, bias = (normal(*s, dtype=dtype) for s in ((m, k), (5, k, n), (5, n)))
    stored = jnp.swapaxes(rhs, 1, 2) if transposed else rhs
    epilogue = Epilogue(activation=activation, results=(True, True))
    spec = ragged.dot(
        *(out_dtype, PRECISION, config.name),
        transpose_b=transposed,
        has_bias=True,
        epilogue=epilogue,
    )

    @jax.jit
    def dot(lhs, rhs, sizes, bias):
        return gemm_primitive.bind(Operands(lhs, rhs, sizes, bias=bias), spec)

    by_xla = jax.jit(functools.partial(ragged_reference.reference_product, spec=spec))
    for sizes in SIZES:
        used = int(bounds(sizes, m)[-1])
        mine = lhs.at[used:].set(jnp.nan)  # kernels must not read rows outside all groups
        counts = jnp.asarray(sizes, jnp.int32)
        baselines = by_xla(lhs, stored, counts, bias)
        poison((m, n), out_dtype)
        got = dot(mine, stored, counts, bias)
        for actual, baseline, f in zip(got, baselines, (activation, None), strict=True):
            wanted = looped(lhs, rhs, sizes, bias, f)
            assert actual.dtype == out_dtype
            assert_accurate(actual, baseline, wanted, order(k, np.abs(wanted).max()))
            assert not np.asarray(actual[used:]).any()


@pytest.mark.parametrize("out", ["operands'", "float32"])
@fallbacks("k")
def test_groups_of_k(normal, assert_accurate, config, out):
    dtype = jnp.dtype(INPUT_DTYPES[config.algorithm])
    out_dtype = dtype if out == "operands'" else jnp.dtype(F32)
    rows, m, n = 57, 72, 40
    lhs, rhs = normal(rows, m, dtype=dtype), normal(rows, n, dtype=dtype)
    spec = ragged.contraction(out_dtype, PRECISION, config.name)
    contraction = jax.jit(lambda *x: gemm_primitive.bind(Operands(*x), spec))
    by_xla = jax.jit(functools.partial(ragged_reference.reference_product, spec=spec))
    for sizes in SIZES:
        at = bounds(sizes, rows)
        mine = lhs.at[at[-1] :].set(jnp.nan), rhs.at[at[-1] :].set(jnp.inf)
        counts = jnp.asarray(sizes, jnp.int32)
        (baseline,) = by_xla(lhs, rhs, counts)
        poison((5, m, n), out_dtype)
        (got,) = contraction(*mine, counts)
        wanted = contracted(lhs, rhs, sizes)
        assert got.dtype == out_dtype
        assert_accurate(got, baseline, wanted, order(rows, np.abs(wanted).max()))
        assert not np.asarray(got)[np.diff(at) == 0].any()


@fallbacks("m")
def test_many_groups_and_gradients(rng, normal, assert_accurate, config):
    """In the gradient, the named row computes the pre-activation; any kernel computes the rest."""
    dtype = jnp.dtype(INPUT_DTYPES[config.algorithm])
    m, n, k, groups = 500, 136, 200, 300
    sizes = rng.integers(-2, 5, groups)
    lhs, rhs, ct = (normal(*s, dtype=dtype) for s in ((m, k), (groups, k, n), (m, n)))
    rhs = (rhs * k**-0.5).astype(dtype)
    counts = jnp.asarray(sizes, jnp.int32)

    def pulled(config, lhs, rhs, ct):
        def product(lhs, rhs):
            return ragged_dot(lhs, rhs, counts, activation="silu", config=config)

        y, vjp = jax.vjp(product, lhs, rhs)
        return y, *vjp(ct)

    y, dlhs, drhs = jax.jit(functools.partial(pulled, config.name))(lhs, rhs, ct)
    z = looped(lhs, rhs, sizes)
    sigma = 1 / (1 + np.exp(-z))
    dz = np.asarray(ct, np.float64) * sigma * (1 + z * (1 - sigma))
    dz[int(bounds(sizes, m)[-1]) :] = 0
    exact = (
        looped(lhs, rhs, sizes, None, "silu"),
        looped(dz, jnp.swapaxes(rhs, 1, 2), sizes),
        contracted(lhs, dz, sizes),
    )
    # z, and so dz, is rounded to the operands' type in between.
    eps = float(jnp.finfo(dtype).eps)
    for actual, wanted in zip((y, dlhs, drhs), exact, strict=True):
        slack = 0.0 if actual is y else 2 * eps * np.abs(wanted).max()
        slack += order(k, np.abs(wanted).max())
        assert_accurate(actual, jnp.asarray(wanted, dtype), wanted, slack)


@pytest.mark.parametrize("transposed", [False, True])
@DTYPES
def test_odd_groups_need_no_name(normal, monkeypatch, dtype, transposed):
    """TMA cannot step over these unpadded extents, so no other row computes them."""
    monkeypatch.setattr(ragged_lowering, "_padded", lambda x, dtype: x.astype(dtype))
    monkeypatch.setattr(devices, "local_device", lambda matches: None)
    m, n, k = 57, 13, 21
    lhs, rhs, ct = (normal(*s, dtype=dtype) for s in ((m, k), (5, k, n), (m, n)))
    stored = jnp.swapaxes(rhs, 1, 2) if transposed else rhs
    for sizes in SIZES:
        counts = jnp.asarray(sizes, jnp.int32)
        product = functools.partial(ragged_dot, group_sizes=counts, transpose_rhs=transposed)

        def pulled(lhs, rhs, ct, product=product):
            d, vjp = jax.vjp(product, lhs, rhs)
            return d, *vjp(ct)

        traced = jax.jit(pulled).trace(lhs, stored, ct).lower()
        assert traced.as_text().count("@jax_tcgemm_ragged_dot") == 3
        d, dlhs, drhs = traced.compile()(lhs, stored, ct)
        drhs = jnp.swapaxes(drhs, 1, 2) if transposed else drhs
        exact = (
            looped(lhs, rhs, sizes),
            looped(ct, jnp.swapaxes(rhs, 1, 2), sizes),
            contracted(lhs, ct, sizes),
        )
        for actual, wanted in zip((d, dlhs, drhs), exact, strict=True):
            error = np.abs(np.asarray(actual, np.float64) - wanted).max()
            assert error <= float(jnp.finfo(dtype).eps) * np.abs(wanted).max()


@pytest.mark.parametrize("packed", [False, True])
@DTYPES
def test_odd_gated_products_need_no_name(normal, exact, monkeypatch, dtype, packed):
    monkeypatch.setattr(fallback.kernels, "no_gated_kernel", lambda *_: None)
    m, n, k = 131, 33, 57
    x = normal(m, k, dtype=dtype)
    gate, up = ((normal(k, n) * k**-0.5).astype(dtype) for _ in range(2))
    weights = [jnp.concatenate([gate, up], 1)] if packed else [gate, up]
    lowered = jax.jit(lambda *x: gated_gemm(*x)).lower(x, *weights)
    assert lowered.as_text().count("@jax_tcgemm_gemm") == 1
    poison((m, n), dtype)
    got = lowered.compile()(x, *weights)
    g, u = (exact(x) @ exact(w) for w in (gate, up))
    wanted = g / (1 + np.exp(-g)) * u
    error = np.abs(exact(got) - wanted).max()
    assert error <= float(jnp.finfo(dtype).eps) * np.abs(wanted).max()


@pytest.mark.parametrize("in_axes", [(0, None, None), (1, 1, 1), (None, 0, 0), (0, 1, 1)])
@by_config(gated=True)
def test_gated_batches(normal, exact, assert_accurate, config, in_axes):
    dtype = INPUT_DTYPES[config.algorithm]
    k, n = (72, 24) if config.copies_whole_chunks else (71, 23)
    shapes = [(40, k), (k, n), (k, n)]
    args = [
        normal(*(shape if axis is None else np.insert(shape, axis, 8)), dtype=dtype)
        for shape, axis in zip(shapes, in_axes, strict=True)
    ]

    def formula(x, w, v):
        return jax.nn.silu(x @ w) * (x @ v)

    ours = jax.vmap(functools.partial(gated_gemm, config=config.name), in_axes)
    baseline = jax.jit(jax.vmap(formula, in_axes))(*args)
    poison(baseline.shape, dtype)
    got = jax.jit(ours)(*args)
    expected = in_float64(jax.vmap(formula, in_axes), *args)
    assert_accurate(got, baseline, expected)


@by_config(gated=True)
def test_gated_gradients(normal, exact, assert_accurate, config):
    """The named row computes the product and both pre-activations."""
    dtype = INPUT_DTYPES[config.algorithm]
    m, n, k = (72, 40, 64) if config.copies_whole_chunks else (71, 39, 63)
    shapes = (m, k), (k, n), (k, n), (n,), (n,)
    args = [normal(*shape, dtype=dtype) for shape in shapes]
    args[1:3] = [(w * k**-0.5).astype(dtype) for w in args[1:3]]
    ct = normal(m, n, dtype=dtype)

    def formula(x, w, v, bias, other):
        return jax.nn.silu(x @ w + bias) * (x @ v + other)

    def ours(x, w, v, bias, other):
        biases = {"bias_gate": bias, "bias_up": other}
        return gated_gemm(x, w, v, **biases, config=config.name)

    def pulled(f, *args):
        return jax.vjp(f, *args[:-1])[1](args[-1])

    got = jax.jit(functools.partial(pulled, ours))(*args, ct)
    baseline = jax.jit(functools.partial(pulled, formula))(*args, ct)
    expected = in_float64(functools.partial(pulled, formula), *args, ct)
    for actual, other, wanted in zip(got, baseline, expected, strict=True):
        assert_accurate(actual, other, wanted)
