"""``fp8_dot`` in Flax layers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tcgemm.api.fp8 import fp8_dot, fp8_dot_general

nn = pytest.importorskip("flax.linen")

from flax import nnx  # noqa: E402
from flax.linen import fp8_ops  # noqa: E402

from jax_tcgemm.api.flax_fp8 import Fp8DotGeneral  # noqa: E402


def test_linen_as_flax_has_it(normal):
    x, target, curves, found = normal(6, 16), normal(6, 8), {}, {}
    for cls in (Fp8DotGeneral, fp8_ops.Fp8DirectDotGeneralOp):
        layer = nn.Dense(8, dot_general_cls=cls)
        variables = layer.init(jax.random.key(0), x)

        @jax.jit
        def step(variables, layer=layer):
            def error(variables):
                return jnp.mean((layer.apply(variables, x) - target) ** 2)

            value, new = jax.value_and_grad(error)(variables)
            learnt = jax.tree.map(lambda p, g: p - g, variables["params"], new["params"])
            return value, {**new, "params": learnt}

        curves[cls] = []
        for _ in range(4):
            value, variables = step(variables)
            curves[cls].append(float(value))
        (found[cls],) = variables[fp8_ops.OVERWRITE_WITH_GRADIENT].values()
    ours, theirs = found.values()
    assert ours.keys() == theirs.keys()
    # Rounding in float32 may change single values by one float8 step.
    np.testing.assert_allclose(*curves.values(), rtol=1e-2)
    for name in ours:
        assert ours[name].shape == theirs[name].shape
        np.testing.assert_allclose(np.sort(ours[name]), np.sort(theirs[name]), rtol=0.1)


def test_linen_without_a_state(normal):
    x = normal(2, 3, 16, dtype=jnp.bfloat16)
    own = functools.partial(Fp8DotGeneral, recipe="current")
    layer = nn.DenseGeneral((4, 2), axis=(-2, -1), dot_general_cls=own, dtype=jnp.bfloat16)
    variables = layer.init(jax.random.key(0), x)
    assert list(variables) == ["params"]
    w = variables["params"]["kernel"].astype(jnp.bfloat16).reshape(48, 8)
    np.testing.assert_array_equal(
        layer.apply(variables, x), fp8_dot(x.reshape(2, 48), w).reshape(2, 4, 2)
    )


def test_nnx(normal):
    own = functools.partial(fp8_dot_general, recipe="block")
    layer = nnx.Linear(128, 128, dot_general=own, use_bias=False, rngs=nnx.Rngs(0))
    x = normal(3, 128)
    got = nnx.jit(lambda layer, x: layer(x))(layer, x)
    np.testing.assert_allclose(got, fp8_dot(x, layer.kernel[...], recipe="block"), rtol=1e-5)
