"""The activations: their references against float64, and the names of the C++ functors."""

from __future__ import annotations

import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tcgemm import clip, gemm, softcap
from jax_tcgemm.problem.activations import ACTIVATIONS, resolve

ALL = [*ACTIVATIONS, softcap(2.5), clip(-0.5, 1.25), clip(-math.inf, 1)]
EACH = pytest.mark.parametrize("activation", ALL, ids=str)


@EACH
def test_reference(activation):
    z = np.linspace(-30, 30, 4001)
    got = resolve(activation).reference(jnp.asarray(z, jnp.float32))
    expected = resolve(activation).exact(z.astype(np.float32).astype(np.float64))
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.any_jax
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@EACH
def test_fused(normal, exact, assert_accurate, activation, dtype):
    a, b, bias = normal(12, 20, dtype=dtype), normal(20, 9, dtype=dtype), normal(9, dtype=dtype)
    got = gemm(a, b, bias=bias, alpha=0.5, activation=activation)
    z = 0.5 * jnp.matmul(a, b, preferred_element_type=jnp.float32) + bias.astype(jnp.float32)
    baseline = resolve(activation).reference(z).astype(dtype)
    exact_z = 0.5 * (exact(a) @ exact(b)) + exact(bias)
    assert_accurate(got, baseline, resolve(activation).exact(exact_z))


@pytest.mark.any_jax
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@EACH
def test_derivative_is_rounded_once(exact, rng, activation, dtype):
    """With an identity matrix, the derivative is the activation's derivative at the rounded sum."""
    z = jnp.asarray(rng.uniform(-4, 4, (8, 8)), dtype)
    eye = jnp.eye(8, dtype=dtype)
    _, got = jax.jvp(lambda z: gemm(z, eye, activation=activation), (z,), (jnp.ones_like(z),))
    with jax.enable_x64(True):
        wide = jnp.asarray(exact(z))
        expected = resolve(activation).derivative(wide)
    half = float(jnp.finfo(dtype).eps) / 2
    # Far from zero, cancellation limits the float32 derivative to this accuracy.
    np.testing.assert_allclose(exact(got), expected, rtol=1.01 * half, atol=1e-5)


def test_functors_exist():
    source = pathlib.Path(__file__).parents[1] / "cuda" / "epilogue" / "activations.cuh"
    if not source.exists():
        pytest.skip("no source tree beside the tests")
    text = source.read_text()
    rows = {resolve(activation).name: resolve(activation).cpp_name for activation in ALL}
    assert len(set(rows.values())) == len(rows)
    for functor in rows.values():
        assert f"struct {functor} " in text


def test_activations_with_parameters_are_values():
    assert softcap(30) == softcap(30.0) != softcap(31)
    assert hash(clip(-1, 1)) == hash(clip(-1.0, np.float32(1)))
    assert [str(x) for x in (softcap(30), clip(0, 6))] == ["softcap(30.0)", "clip(0.0, 6.0)"]


def test_nan_passes():
    nan = jnp.full((2, 2), jnp.nan)
    for activation in (clip(-1, 1), softcap(3), "relu_squared"):
        assert jnp.isnan(gemm(nan, nan, activation=activation)).all()


@pytest.mark.parametrize(
    ("make", "error", "part"),
    [
        (lambda: softcap(0), ValueError, "cap=0.0 must be above 0"),
        (lambda: softcap(-1.5), ValueError, "cap=-1.5"),
        (lambda: softcap(math.inf), ValueError, "cap=inf"),
        (lambda: softcap("x"), TypeError, "cap='x' must be a Python number"),
        (lambda: softcap(None), TypeError, "cap=None"),
        (lambda: jax.jit(softcap)(2.0), TypeError, "cap="),
        (lambda: clip(2, 1), ValueError, "lower=2.0 must not be above upper=1.0"),
        (lambda: clip(math.nan, 1), ValueError, "lower=nan"),
        (lambda: clip(0, jnp.ones(2)), TypeError, "upper="),
    ],
)
def test_bad_parameters(make, error, part):
    with pytest.raises(error) as raised:
        make()
    assert part in str(raised.value)
