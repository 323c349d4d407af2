"""Random shapes, layouts, epilogues and vmap axes, against `jnp.matmul` and the formula."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jax_tcgemm import gemm
from jax_tcgemm.problem.activations import ACTIVATIONS

pytestmark = pytest.mark.any_jax

_settings = settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
extents = st.integers(0, 9)
activations = st.sampled_from([None, *ACTIVATIONS])
seeds = st.integers(0, 2**32 - 1)


@st.composite
def broadcastable(draw, shape):
    """Draws a shape that broadcasts to `shape`."""
    kept = shape[draw(st.integers(0, len(shape))) :]
    return tuple(1 if draw(st.booleans()) else extent for extent in kept)


@st.composite
def problems(draw):
    batch = tuple(draw(st.lists(st.integers(1, 3), max_size=3)))
    m, n, k = (draw(extents) for _ in range(3))
    transpose_a, transpose_b = draw(st.booleans()), draw(st.booleans())
    a_batch, b_batch = draw(broadcastable(batch)), draw(broadcastable(batch))
    result = np.broadcast_shapes(a_batch, b_batch)
    return {
        "a": (*a_batch, *((k, m) if transpose_a else (m, k))),
        "b": (*b_batch, *((n, k) if transpose_b else (k, n))),
        "c": draw(st.none() | broadcastable((*result, m, n))),
        "bias": draw(st.none() | broadcastable(result).map(lambda shape: (*shape, n))),
        "flags": {"transpose_a": transpose_a, "transpose_b": transpose_b},
        "activation": draw(activations),
        "alpha": draw(st.sampled_from([1.0, -0.5, 0.0])),
        "beta": draw(st.sampled_from([1.0, 2.0])),
    }


@_settings
@given(problems(), seeds, st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]), st.booleans())
def test_against_the_formula(problem, seed, dtype, traced_scalars):
    rng = np.random.default_rng(seed)

    def array(name):
        return jnp.asarray(rng.standard_normal(problem[name]), dtype)

    a, b = array("a"), array("b")
    c = None if problem["c"] is None else array("c")
    bias = None if problem["bias"] is None else array("bias")
    scalars = {name: problem[name] for name in ("alpha", "beta")}
    if traced_scalars:
        scalars = {name: jnp.float32(value) for name, value in scalars.items()}
    got = gemm(a, b, c, bias=bias, activation=problem["activation"], **scalars, **problem["flags"])
    wide = [np.asarray(x).astype(np.float64) for x in (a, b)]
    a64 = wide[0].swapaxes(-1, -2) if problem["flags"]["transpose_a"] else wide[0]
    b64 = wide[1].swapaxes(-1, -2) if problem["flags"]["transpose_b"] else wide[1]
    z = problem["alpha"] * (a64 @ b64)
    z = z if c is None else z + problem["beta"] * np.asarray(c).astype(np.float64)
    z = z if bias is None else z + np.asarray(bias).astype(np.float64)[..., None, :]
    if problem["activation"] is not None:
        with jax.enable_x64(True):
            z = ACTIVATIONS[problem["activation"]].reference(jnp.asarray(z))
    assert got.dtype == dtype
    eps = max(float(jnp.finfo(dtype).eps), 1e-5)
    np.testing.assert_allclose(np.asarray(got).astype(np.float64), z, rtol=eps, atol=2e-5)


@st.composite
def vmapped(draw):
    """Draws a gemm under up to three vmaps: in_axes of every operand, innermost vmap first."""
    shapes = {"a": (4, 6), "b": (6, 5), "c": (4, 5), "bias": (5,), "alpha": (), "beta": ()}
    levels = []
    for size in draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)):
        axes = {
            name: draw(st.none() | st.integers(0, len(shape))) for name, shape in shapes.items()
        }
        if all(axis is None for axis in axes.values()):
            axes["bias"] = 0
        for name, axis in axes.items():
            if axis is not None:
                shapes[name] = (*shapes[name][:axis], size, *shapes[name][axis:])
        levels.append(tuple(axes.values()))
    return shapes, levels


@pytest.mark.nightly
@_settings
@given(vmapped(), seeds, activations)
def test_vmap_and_its_gradient(case, seed, activation):
    shapes, levels = case
    rng = np.random.default_rng(seed)
    args = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes.values()]

    def fused(a, b, c, bias, alpha, beta):
        return gemm(a, b, c, bias=bias, alpha=alpha, beta=beta, activation=activation)

    def formula(a, b, c, bias, alpha, beta):
        z = alpha * (a @ b) + beta * c + bias
        return z if activation is None else ACTIVATIONS[activation].reference(z)

    def value_and_pullback(function):
        for axes in levels:
            function = jax.vmap(function, in_axes=axes)
        value, pullback = jax.vjp(function, *args)
        size = math.prod(value.shape)
        return value, pullback(jnp.cos(jnp.arange(size, dtype=jnp.float32)).reshape(value.shape))

    for actual, expected in zip(
        jax.tree.leaves(value_and_pullback(jax.jit(fused))),
        jax.tree.leaves(value_and_pullback(jax.jit(formula))),
        strict=True,
    ):
        np.testing.assert_allclose(actual, expected, rtol=2e-3, atol=2e-3)
