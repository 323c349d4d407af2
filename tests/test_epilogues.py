"""The activations: the references against float64, and the C++ functors' names."""

from __future__ import annotations

import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tcgemm import gemm
from jax_tcgemm.epilogues import ACTIVATIONS

_erf = np.vectorize(math.erf, otypes=[np.float64])

# Written apart from the package's references.
FORMULAS = {
    "relu": lambda z: np.maximum(z, 0),
    "gelu": lambda z: z / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
    "gelu_exact": lambda z: z / 2 * (1 + _erf(z / math.sqrt(2))),
    "silu": lambda z: z / (1 + np.exp(-z)),
    "sigmoid": lambda z: 1 / (1 + np.exp(-z)),
    "tanh": np.tanh,
}


def test_every_activation_has_a_formula():
    assert set(FORMULAS) == set(ACTIVATIONS)
    assert len({row.cpp_name for row in ACTIVATIONS.values()}) == len(ACTIVATIONS)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_reference(name):
    z = np.linspace(-30, 30, 4001)
    got = ACTIVATIONS[name].reference(jnp.asarray(z, jnp.float32))
    np.testing.assert_allclose(
        got, FORMULAS[name](z.astype(np.float32).astype(np.float64)), rtol=2e-6, atol=2e-6
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_fused(normal, exact, assert_accurate, name, dtype):
    a, b, bias = normal(12, 20, dtype=dtype), normal(20, 9, dtype=dtype), normal(9, dtype=dtype)
    got = gemm(a, b, bias=bias, alpha=0.5, activation=name)
    z = 0.5 * jnp.matmul(a, b, preferred_element_type=jnp.float32) + bias.astype(jnp.float32)
    baseline = ACTIVATIONS[name].reference(z).astype(dtype)
    exact_z = 0.5 * (exact(a) @ exact(b)) + exact(bias)
    assert_accurate(got, baseline, FORMULAS[name](exact_z))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_derivative_is_rounded_once(exact, rng, name, dtype):
    """With an identity matrix the derivative is that of the activation at the rounded sum."""
    z = jnp.asarray(rng.uniform(-4, 4, (8, 8)), dtype)
    eye = jnp.eye(8, dtype=dtype)
    _, got = jax.jvp(lambda z: gemm(z, eye, activation=name), (z,), (jnp.ones_like(z),))
    with jax.enable_x64(True):
        wide = jnp.asarray(exact(z))
        _, expected = jax.jvp(ACTIVATIONS[name].reference, (wide,), (jnp.ones_like(wide),))
    half = float(jnp.finfo(dtype).eps) / 2
    # Far from zero the float32 derivative cancels down to this.
    np.testing.assert_allclose(exact(got), expected, rtol=1.01 * half, atol=1e-5)


def test_functors_exist():
    source = pathlib.Path(__file__).parents[1] / "cuda" / "epilogue" / "activations.cuh"
    if not source.exists():
        pytest.skip("no source tree beside the tests")
    text = source.read_text()
    for row in ACTIVATIONS.values():
        assert f"struct {row.cpp_name}" in text or f'"{row.cpp_name}"' in text
