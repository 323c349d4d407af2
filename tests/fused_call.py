"""The fused call, and its formula, for tests of derivatives and transformations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm import gemm
from jax_tcgemm.problem.activations import ACTIVATIONS


def fused(a, b, c, bias, alpha, beta, activation="gelu"):
    return gemm(a, b, c, bias=bias, alpha=alpha, beta=beta, activation=activation)


def formula(a, b, c, bias, alpha, beta, activation="gelu"):
    z = alpha * jnp.matmul(a, b) + beta * c + bias[..., None, :]
    return z if activation is None else ACTIVATIONS[activation].reference(z)


def assert_trees_close(actual, expected, tolerance=2e-4):
    def assert_close(x, y):
        dtype = np.complex64 if np.iscomplexobj(y) else np.float32
        x, y = np.asarray(x, dtype), np.asarray(y, dtype)
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)

    jax.tree.map(assert_close, actual, expected)


def square_sum(function):
    return lambda *args: jnp.sum(jnp.square(function(*args).astype(jnp.float32)))
