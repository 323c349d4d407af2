"""Products of the default choice on a GPU: alignments, derivatives, batches, and large extents."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_accuracy import (
    LAYOUTS,
    baseline_precision,
    in_float64,
)

from jax_tcgemm import gemm
from jax_tcgemm.problem.activations import ACTIVATIONS
from jax_tcgemm.problem.arithmetic import INPUT_DTYPES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("algorithm", INPUT_DTYPES)
@pytest.mark.parametrize("shape", [(5, 7, 9), (65, 33, 130), (127, 129, 257), (1, 1000, 513)])
def test_heuristic_takes_any_alignment(normal, exact, assert_accurate, algorithm, shape):
    """Leading dimensions and batch strides are odd, and no configuration is named."""
    m, n, k = shape
    dtype = INPUT_DTYPES[algorithm]
    for transpose_a, transpose_b in LAYOUTS:
        a = normal(3, *((k, m) if transpose_a else (m, k)), dtype=dtype)
        b = normal(3, *((n, k) if transpose_b else (k, n)), dtype=dtype)
        flags = {"transpose_a": transpose_a, "transpose_b": transpose_b}
        got = jax.jit(lambda a, b, flags=flags: gemm(a, b, precision=algorithm, **flags))(a, b)
        a, b = a.mT if transpose_a else a, b.mT if transpose_b else b
        expected = exact(a) @ exact(b)
        slack = 0.0
        if algorithm == "F16_F16_F16":
            slack = math.ceil(k / 16) * float(jnp.finfo(dtype).eps) * np.abs(expected).max()
        baseline = jnp.matmul(a, b, precision=baseline_precision(algorithm))
        assert_accurate(got, baseline, expected, slack)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_traced_scalars_and_preactivation(normal, exact, dtype):
    a, b, bias = normal(200, 136, dtype=dtype), normal(136, 72, dtype=dtype), normal(72)

    def f(a, b, alpha, beta):
        return gemm(a, b, bias, bias=bias, alpha=alpha, beta=beta, activation="gelu")

    args = (a, b, jnp.float32(0.1), jnp.float32(-0.5))
    got, tangent = jax.jit(lambda *x: jax.jvp(f, x, (a, b, *args[2:])))(*args)
    product = exact(a) @ exact(b)
    z = 0.1 * product + 0.5 * exact(bias)
    dz = 0.3 * product - 0.5 * exact(bias)
    gelu = ACTIVATIONS["gelu"].reference
    expected = in_float64(lambda z, dz: jax.jvp(gelu, (z,), (dz,)), z, dz)
    tolerance = 4 * max(float(jnp.finfo(dtype).eps), 2.0**-10)
    for x, y in zip((got, tangent), expected, strict=True):
        np.testing.assert_allclose(exact(x), y, rtol=tolerance, atol=tolerance * np.abs(y).max())


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_gradients(normal, exact, assert_accurate, dtype):
    x, w = normal(4, 33, 80, dtype=dtype), normal(80, 48, dtype=dtype)
    bias, g = normal(48, dtype=dtype), normal(4, 33, 48, dtype=dtype)
    precision = "TF32_TF32_F32" if dtype == jnp.float32 else None
    with jax.default_matmul_precision(precision):
        ours = jax.jit(lambda *p: jax.vjp(lambda x, w, b: gemm(x, w, bias=b), *p)[1](g))
        baselines = jax.jit(lambda *p: jax.vjp(lambda x, w, b: x @ w + b, *p)[1](g))
        actual, baseline = ours(x, w, bias), baselines(x, w, bias)
    expected = (
        exact(g) @ exact(w).T,
        np.einsum("imk,imn->kn", exact(x), exact(g)),
        exact(g).sum((0, 1)),
    )
    for got, base, z in zip(actual, baseline, expected, strict=True):
        assert_accurate(got, base, z)


@pytest.mark.parametrize("in_axes", [(0, None), (1, None), (2, 0), (1, 1), (None, 2), (0, 0)])
def test_vmap(normal, exact, assert_accurate, in_axes):
    shapes = [(40, 72), (72, 24)]
    args = [
        normal(*(shape if axis is None else np.insert(shape, axis, 5)), dtype=jnp.bfloat16)
        for shape, axis in zip(shapes, in_axes, strict=True)
    ]
    f = jax.jit(jax.vmap(lambda a, b: gemm(a, b), in_axes))
    g = jax.jit(jax.vmap(jnp.matmul, in_axes))
    moved = [
        exact(x) if axis is None else np.moveaxis(exact(x), axis, 0)
        for x, axis in zip(args, in_axes, strict=True)
    ]
    assert_accurate(f(*args), g(*args), moved[0] @ moved[1])


def test_large_batch(normal, exact, assert_accurate):
    """The batch is larger than a grid dimension."""
    a, b = normal(70000, 5, 8, dtype=jnp.bfloat16), normal(70000, 8, 3, dtype=jnp.bfloat16)
    assert_accurate(jax.jit(gemm)(a, b), jnp.matmul(a, b), exact(a) @ exact(b))


def test_more_than_2_to_the_31_elements(normal, exact):
    """The last rows of a product are right if operand and result both exceed 2^31 elements."""
    m, n, k = 2**16 + 8, 2**15 + 8, 2**15 + 64
    a = jnp.zeros((m, k), jnp.bfloat16).at[-4:].set(normal(4, k, dtype=jnp.bfloat16))
    b = jnp.zeros((k, n), jnp.bfloat16).at[:, -4:].set(normal(k, 4, dtype=jnp.bfloat16))
    got = jax.jit(gemm)(a, b)
    expected = exact(a[-4:]) @ exact(b[:, -4:])
    np.testing.assert_allclose(exact(got[-4:, -4:]), expected, rtol=1e-2, atol=1)
    assert not bool(jnp.any(got[:-4]))
    assert not bool(jnp.any(got[:, :-4]))
