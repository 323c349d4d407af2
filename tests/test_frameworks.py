"""Training steps of frameworks do the same under `fuse` as under the framework's own `jit`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from framework_steps import FRAMEWORKS
from nightly import slow
from training_step import Framework, batch

from jax_tcgemm import fuse

# The warnings come from older frameworks with a newer JAX.
pytestmark = [pytest.mark.any_jax, pytest.mark.filterwarnings("default")]

STEPS = 5
WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "fuse within jit": lambda step, jit: jit(fuse(step)),
    "fuse of jit": lambda step, jit: fuse(jit(step)),
    "fuse alone": lambda step, _: fuse(step),
}
# Tolerances of the losses (relative) and of the parameters (relative to how far training moves
# them).
TOLERANCES = {"float32": (1e-5, 1e-2), "bfloat16": (2e-2, 0.5)}


def _framework(name: str) -> Framework:
    if name != "plain":
        pytest.importorskip(name.split()[0].split(".")[0])
    return FRAMEWORKS[name]()


def _numbers(tree: Any) -> list[np.ndarray]:
    """Returns the leaves in float64, except integers."""
    found = []
    for leaf in map(jnp.asarray, jax.tree.leaves(tree)):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        is_exact = jnp.issubdtype(leaf.dtype, jnp.integer) or leaf.dtype == jnp.bool_
        found.append(np.array(leaf) if is_exact else np.array(leaf, np.float64))
    return found


def _trained(framework: Framework, compiled: Any, dtype: Any) -> tuple[list[float], Any, Any]:
    """Returns the losses, and the numbers of the state before and after training."""
    x, y = batch()
    state = framework.start(dtype)
    before = _numbers(framework.observed(state))
    losses = []
    for _ in range(STEPS):
        state, loss = framework.run(compiled, state, x, y)
        losses.append(float(loss))
    return losses, before, _numbers(framework.observed(state))


@functools.cache
def _plain(name: str, dtype: str) -> tuple[list[float], Any, Any]:
    framework = FRAMEWORKS[name]()
    return _trained(framework, framework.jit(framework.step), jnp.dtype(dtype))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [slow(x) if x == "float32" else x for x in TOLERANCES])
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_five_steps(name, dtype, way):
    framework = _framework(name)
    if way != "fuse within jit":
        if framework.jits_itself:
            pytest.skip("the framework applies its jit itself")
        if dtype == "bfloat16":
            pytest.skip("shown in float32; the products are those of fuse within jit")
    plain_losses, plain_before, plain = _plain(name, dtype)
    compiled = WAYS[way](framework.step, framework.jit)
    losses, before, after = _trained(framework, compiled, jnp.dtype(dtype))
    of_losses, of_parameters = TOLERANCES[dtype]
    assert plain_losses[-1] < plain_losses[0]
    np.testing.assert_allclose(losses, plain_losses, rtol=of_losses)
    assert len(after) == len(plain)
    for own, expected, first, plain_first in zip(after, plain, before, plain_before, strict=True):
        np.testing.assert_array_equal(first, plain_first)  # both start equal
        assert own.shape == expected.shape
        if own.dtype != np.float64:  # counts, keys
            np.testing.assert_array_equal(own, expected)
            continue
        moved = np.linalg.norm(expected - first)
        assert np.linalg.norm(own - expected) <= of_parameters * moved
        assert (np.linalg.norm(own - first) > 0) == (moved > 0)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_no_array_comes_back_as_it_is(way):
    eqx = pytest.importorskip("equinox")
    framework = FRAMEWORKS["equinox"]()
    state, _ = framework.run(
        WAYS[way](framework.step, framework.jit), before := framework.start("float32"), *batch()
    )
    assert jax.tree.structure(state) == jax.tree.structure(before)
    others = [[x for x in jax.tree.leaves(each) if not eqx.is_array(x)] for each in (before, state)]
    assert others[0]
    for x, y in zip(*others, strict=True):
        assert x is y or (type(x), x) == (type(y), y)
