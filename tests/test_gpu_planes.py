"""float32 products by products of planes, on a GPU, against float64 and XLA's own."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_accuracy import LAYOUTS, in_float64, poison

from jax_tcgemm import gemm
from jax_tcgemm.kernels.arithmetic import PLANE_PRODUCTS
from jax_tcgemm.lowering import fallback
from jax_tcgemm.problem.activations import ACTIVATIONS

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

LARGEST = float(jnp.finfo(jnp.float32).max)

# The least tolerance, relative to |A| |B|: the planes hold 16 bits, or 24.
ERRORS = {"F32_F32_F32": 0.0, "BF16_BF16_F32_X3": 2**-15, "BF16_BF16_F32_X6": 0.0}
ERRORS |= {"BF16_BF16_F32_X9": 0.0, "TF32_TF32_F32_X3": 0.0}


@pytest.fixture
def any_size(monkeypatch):
    """Makes products of planes compute small problems, too."""
    monkeypatch.setattr(fallback.planes, "_SHARE", math.inf)
    monkeypatch.setattr(fallback.planes, "_LEAST_K", 0)
    monkeypatch.setattr(fallback.planes, "_LEAST_WORK", 0)


@pytest.fixture
def takes_planes(said):
    """Checks that the programs lowered in the meantime use products of planes."""
    yield
    assert said
    assert all("planes in" in line for line in said), said


def errors(got, a, b, exact=None):
    """Returns the error of each element relative to |A| |B|."""
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    exact = a @ b if exact is None else exact
    bound = np.abs(a) @ np.abs(b)
    return np.abs(np.asarray(got, np.float64) - exact) / np.where(bound == 0, 1, bound)


def by_planes(a, b, transpose_a=False, transpose_b=False, precision="highest", **options):
    a = a.mT.copy() if transpose_a else a
    b = b.mT.copy() if transpose_b else b
    poison((*a.shape[:-2], a.shape[-1 if transpose_a else -2], b.shape[-1]), jnp.float32)
    f = functools.partial(
        gemm, transpose_a=transpose_a, transpose_b=transpose_b, precision=precision, **options
    )
    return jax.jit(f)(a, b)


def by_xla(a, b):
    return jax.jit(functools.partial(jnp.matmul, precision="highest"))(a, b)


def check(a, b, precision="highest", lost=0.0, **options):
    """Checks that the error is at most one and a half times XLA's in float32.

    Args:
        a: the first factor.
        b: the second factor.
        precision: the precision of the product.
        lost: the error of each number of one factor, as docs/precision.md states for denormals.
        **options: further arguments of the product.
    """
    got = errors(by_planes(a, b, precision=precision, **options), a, b)
    baseline = errors(by_xla(a, b), a, b).max()
    allowed = max(1.5 * baseline, ERRORS.get(precision, 0.0))
    # Errors with random signs: five standard deviations of their sum. The means are in float64,
    # since GPUs may flush denormals to zero.
    mean = [np.mean(np.abs(np.asarray(x, np.float64))) for x in (a, b)]
    sums = 5 * lost * 3**-0.5 * np.sqrt(a.shape[1]) / (a.shape[1] * mean[0] * mean[1])
    assert got.max() <= allowed + sums, (precision, a.shape, b.shape, got.max(), baseline)


@pytest.mark.usefixtures("takes_planes", "any_size")
@pytest.mark.parametrize("precision", PLANE_PRODUCTS)
@pytest.mark.parametrize(("transpose_a", "transpose_b"), LAYOUTS)
def test_layouts_and_residues(normal, rng, transpose_a, transpose_b, precision):
    for _ in range(3):
        m, n, k = (int(x) for x in rng.integers((1, 1, 64), (600, 600, 1200)))
        a, b = normal(m, k, dtype=jnp.float32), normal(k, n, dtype=jnp.float32)
        check(a, b, precision, transpose_a=transpose_a, transpose_b=transpose_b)


KINDS = {
    "positive": lambda rng, *shape: rng.random(shape),
    "rows of any scale": lambda rng, m, k: (
        rng.standard_normal((m, k)) * 2.0 ** rng.integers(-60, 60, (m, 1))
    ),
    "columns of any scale": lambda rng, m, k: (
        rng.standard_normal((m, k)) * 2.0 ** rng.integers(-20, 20, (1, k))
    ),
    "elements of any scale": lambda rng, *shape: (
        rng.standard_normal(shape) * 2.0 ** rng.integers(-30, 30, shape)
    ),
    "tiny": lambda rng, *shape: rng.standard_normal(shape) * 2.0**-124,
    "denormal": lambda rng, *shape: rng.standard_normal(shape) * 2.0**-130,
    "large": lambda rng, m, k: rng.uniform(-1, 1, (m, k)) * (LARGEST / k),
    "whole numbers": lambda rng, *shape: rng.integers(-1000, 1000, shape),
    "bfloat16": lambda rng, *shape: rng.integers(-8, 8, shape) / 8,
}


@pytest.mark.usefixtures("takes_planes")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(904, 840, 1040), (1536, 1400, 256), (1400, 1540, 1040), (1100, 1000, 4096)],
)
def test_kinds_of_numbers(rng, kind, m, n, k):
    """The sizes use planes; XLA adds up smaller products in parts and has smaller errors."""
    a = jnp.asarray(KINDS[kind](rng, m, k), jnp.float32)
    b = jnp.asarray(rng.standard_normal((k, n)), jnp.float32)
    lost = {"denormal": 2.0**-148}.get(kind, 0.0)
    check(a, b, lost=lost)
    check(b.mT.copy(), a.mT.copy(), lost=lost)
    if kind not in ("tiny", "denormal", "large", "rows of any scale"):
        check(a, jnp.asarray(KINDS[kind](rng, k, n), jnp.float32))


@pytest.mark.usefixtures("takes_planes")
@pytest.mark.parametrize("precision", ["highest", "BF16_BF16_F32_X3"])
@pytest.mark.parametrize("power", [-142, -110, -70, -62, 0, 51, 60])
def test_the_range_of_planes_as_they_are(rng, precision, power):
    """One element may require scaling all planes, and products of two such lower both ranges."""
    m, n, k = 1500, 1500, 1040
    a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    x = np.array(a)
    x[700, 900] = 2.0**power
    check(jnp.asarray(x, jnp.float32), jnp.asarray(b, jnp.float32), precision)
    check(jnp.asarray(b.T, jnp.float32), jnp.asarray(x.T, jnp.float32), precision)
    scale = 2.0 ** max(power, -126 + 30)
    scaled = [jnp.asarray(x * scale, jnp.float32) for x in (a, b)]
    lost = 2.0**-148 if power < -70 else 0.0
    check(scaled[0], jnp.asarray(b, jnp.float32), precision, lost=lost)
    if power >= -70:
        check(*scaled, precision)


@pytest.mark.usefixtures("takes_planes")
def test_elements_that_vanish(rng):
    """The elements decrease to zero, like those of a Gaussian kernel."""
    x, y = rng.uniform(-10, 10, (1100, 1)), rng.uniform(-10, 10, (1, 1040))
    a = jnp.asarray(np.exp(-((x - y) ** 2)), jnp.float32)
    check(a, jnp.asarray(rng.standard_normal((1040, 1000)), jnp.float32), lost=2.0**-148)
    check(a.mT.copy(), a, lost=2.0**-148)


@pytest.mark.usefixtures("takes_planes")
def test_cancellation(rng):
    half = rng.standard_normal((1300, 1000))
    a = jnp.asarray(np.concatenate([half, half], axis=1), jnp.float32)
    b = rng.standard_normal((1000, 1200))
    b = jnp.asarray(np.concatenate([b, -b * (1 + 2.0**-12)]), jnp.float32)
    check(a, b)


@pytest.mark.usefixtures("takes_planes", "any_size")
@pytest.mark.parametrize("precision", PLANE_PRODUCTS)
def test_infinities_and_nan(rng, precision):
    a, b = rng.standard_normal((260, 300)), rng.standard_normal((300, 140))
    a[3, 5] = a[250, 0] = b[7, 20] = np.inf
    a[4, 6] = b[299, 139] = -np.inf
    a[100, 1] = b[2, 3] = np.nan
    a[7, 8], b[10, 9] = LARGEST / 64, -LARGEST / 64  # their products are finite
    a[9, 7] = 0.0  # times the infinity of b
    a, b = jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32)
    got, expected = (np.asarray(x) for x in (by_planes(a, b, precision=precision), by_xla(a, b)))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    odd = ~np.isfinite(expected)
    np.testing.assert_array_equal(got[odd], expected[odd])
    assert np.isfinite(got[~odd]).all()


@pytest.mark.usefixtures("takes_planes", "any_size")
@pytest.mark.parametrize("precision", PLANE_PRODUCTS)
@pytest.mark.parametrize("others", [0.0, 1.0])
def test_nothing_but_infinities(precision, others):
    a, b = np.zeros((260, 300)), np.full((300, 140), others)
    a[3, 5], a[4, 6] = np.inf, -np.inf
    a, b = jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32)
    np.testing.assert_array_equal(by_planes(a, b, precision=precision), by_xla(a, b))


@pytest.mark.usefixtures("takes_planes", "any_size")
@pytest.mark.parametrize("precision", PLANE_PRODUCTS)
def test_beyond_float32(rng, precision):
    """As docs/precision.md states, the result is in range if the sum is in range."""
    a, b = rng.standard_normal((260, 300)), rng.standard_normal((300, 140))
    a[7, 8], b[8, 9] = LARGEST, -LARGEST
    a, b = jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32)
    got, expected = (np.asarray(x) for x in (by_planes(a, b, precision=precision), by_xla(a, b)))
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(expected))
    np.testing.assert_array_equal(got[~np.isfinite(got)], expected[~np.isfinite(got)])


@pytest.mark.usefixtures("takes_planes", "any_size")
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_epilogue(normal, exact, assert_accurate, activation):
    m, n, k = 333, 520, 777
    a, b, c, bias = (normal(*shape, dtype=jnp.float32) for shape in ((m, k), (k, n), (m, n), (n,)))

    def finished(z, c, bias):
        z = z / 16 + 0.5 * c + bias
        return z if activation is None else ACTIVATIONS[activation].reference(z)

    def ours(a, b, c, bias):
        options = {"bias": bias, "activation": activation, "alpha": 1 / 16, "beta": 0.5}
        return gemm(a, b, c, precision="highest", **options)

    got = jax.jit(ours)(a, b, c, bias)
    baseline = jax.jit(lambda a, b, c, bias: finished(by_xla(a, b), c, bias))(a, b, c, bias)
    expected = in_float64(finished, exact(a) @ exact(b), c, bias)
    assert_accurate(got, baseline, expected)


@pytest.mark.usefixtures("takes_planes", "any_size")
def test_batches_and_gradients(normal, exact):
    a, b = normal(3, 130, 300, dtype=jnp.float32), normal(300, 72, dtype=jnp.float32)
    w = normal(3, 130, 72, dtype=jnp.float32)
    mapped = jax.jit(jax.vmap(lambda a, b: gemm(a, b, precision="highest"), (0, None)))
    for i, d in enumerate(mapped(a, b)):
        assert errors(d, a[i], b).max() < 1e-6

    def loss(a, b):
        return (w * gemm(a, b, precision="highest")).sum()

    da, db = jax.jit(jax.grad(loss, argnums=(0, 1)))(a, b)
    for i in range(3):
        assert errors(da[i], w[i], b.T).max() < 1e-6
    rows, cotangents = exact(a).reshape(390, 300), exact(w).reshape(390, 72)
    assert errors(db, rows.T, cotangents).max() < 1e-6
