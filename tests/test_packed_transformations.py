"""Products with packed weights under JAX's transformations."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from packed_values import BF16, close, drawn, weight, wide

import jax_tcgemm
from jax_tcgemm import gemm, pack


def test_derivatives(rng):
    q = weight(rng, "int4", (2, 66, 70), 33, has_zeros=True)
    p = pack(q)
    x, t = drawn(rng, 2, 5, 66), drawn(rng, 2, 5, 66)
    w = wide(q.dequantize())

    def f(x, p, bias):
        return gemm(x, p, bias=bias, preferred_element_type=jnp.float32)

    bias = drawn(rng, 70, dtype=jnp.float32)
    _, tangent = jax.jvp(lambda x: f(x, p, bias), (x,), (t,))
    close(tangent, wide(t) @ w, np.abs(wide(t)) @ np.abs(w), 66)
    ct = drawn(rng, 2, 5, 70, dtype=jnp.float32)
    for transform in (lambda f: f, jax.checkpoint, jax.jit):
        _, pullback = jax.vjp(lambda x, bias: transform(f)(x, p, bias), x, bias)  # noqa: B023
        dx, dbias = pullback(ct)
        assert dx.dtype == BF16
        turned = np.swapaxes(w, -1, -2)
        close(dx, wide(ct) @ turned, np.abs(wide(ct)) @ np.abs(turned), 70, roundings=2)
        np.testing.assert_allclose(dbias, ct.sum((0, 1)), rtol=1e-5, atol=1e-5)
    gradient = jax.grad(lambda p: f(x, p, bias).sum(), allow_int=True)(p)
    assert gradient.values.dtype == jax.dtypes.float0
    assert not np.any(gradient.scales)
    wide_x = x.astype(jnp.float32)
    gradient = jax.grad(lambda p: f(wide_x, p, bias).sum(), allow_int=True)(p)
    assert not np.any(gradient.scales)
    # Second derivatives go through the reverse pass.
    second = jax.jvp(jax.grad(lambda x: jnp.sum(f(x, p, bias) ** 2)), (x,), (t,))[1]
    wanted = 2 * wide(t) @ w @ turned
    np.testing.assert_allclose(wide(second), wanted, atol=3e-2 * np.abs(wanted).max())


@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (1, 0), (0, 2)], ids=str)
def test_vmap(rng, in_axes):
    q = weight(rng, "int4", (3, 66, 10), 33)
    p = pack(q)
    x_axis, w_axis = in_axes
    x = drawn(rng, 2, 4, 66)
    mapped_x = x if x_axis is None else jnp.stack([x, -x, 2 * x], axis=x_axis)
    if w_axis is None:
        p = dataclasses.replace(p, values=p.values[0], scales=p.scales[0])
    else:
        p = jax.tree.map(lambda y: jnp.moveaxis(y, 0, w_axis), p)
    y = jax.vmap(gemm, in_axes)(mapped_x, p)
    a = np.stack([wide(x)] * 3) if x_axis is None else np.moveaxis(wide(mapped_x), x_axis, 0)
    w = wide(q.dequantize())[:, None]
    w = w[:1] if w_axis is None else w
    close(y, a @ w, np.abs(a) @ np.abs(w), 66)
    experts = jax.vmap(jax.vmap(gemm, (None, 0)), (0, None))
    y = experts(x, pack(q))
    a, w = wide(x)[:, None], wide(q.dequantize())
    close(y, a @ w, np.abs(a) @ np.abs(w), 66)


def test_scan_export_and_programs(rng):
    q = weight(rng, "int4", (3, 64, 64), 32)
    layers = pack(q)
    x = drawn(rng, 4, 64)

    def model(x, layers):
        return lax.scan(lambda x, w: (gemm(x, w, activation="tanh"), None), x, layers)[0]

    y = jax.jit(model)(x, layers)
    wanted = model(x, q.dequantize(BF16))
    np.testing.assert_allclose(wide(y), wide(wanted), atol=0.1)
    (m,) = jax.export.symbolic_shape("m")
    types = jax.ShapeDtypeStruct((m, 64), BF16), jax.tree.map(jax.typeof, layers)
    exported = jax.export.export(
        jax.jit(model),
        platforms=("cpu", "cuda"),
        disabled_checks=jax_tcgemm.export_disabled_checks(),
    )(*types)
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(wide(again.call(x, layers)), wide(y))
    program = jax.jit(model)
    for _ in range(3):
        program(x, pack(weight(rng, "int4", (3, 64, 64), 32)))
    assert program._cache_size() == 1


def test_weights_stay_out_of_the_residuals(rng):
    p = pack(weight(rng, "int4", (64, 64), 32))
    _, pullback = jax.vjp(lambda x: gemm(x, p, activation="relu"), drawn(rng, 4, 64))
    sizes = [y.size * y.dtype.itemsize for y in jax.tree.leaves(pullback)]
    assert max(sizes) <= p.values.size  # never 64 x 64 numbers of 16 bits
