"""On a GPU, which compiles them into kernels: functions that differ in one thing only."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_pairs
from function_pairs import SLOPES, VALUES, simplified_constants
from paired_calls import PRODUCT, WRAPPERS, wrong_slopes, wrong_values

from jax_tcgemm import gemm
from jax_tcgemm.epilogue import translation

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

# Other wrappers than `gemm` use the same key for functions.
SOME = {
    name: VALUES[name]
    for name in (
        "the last digits of a number",
        "an array in a call",
        "a number on the device in a call",
        "how random numbers are counted",
    )
}


def test_each_has_its_own_values():
    wrong = wrong_values("gemm", "in one program", VALUES)
    wrong += wrong_values("gemm", "eagerly", VALUES)
    for wrapper in WRAPPERS:
        for way in ("in one program", "exported"):
            wrong += wrong_values(wrapper, way, SOME)
    with simplified_constants(), np.printoptions(precision=1, suppress=True):
        wrong += wrong_values("gemm", "in one program", SOME)
    assert not wrong, "\n".join(wrong)


def test_each_has_its_own_slopes():
    pairs = SOME | SLOPES
    wrong = wrong_slopes(True, pairs) + wrong_slopes(False, pairs)
    assert not wrong, "\n".join(wrong)


def test_random_pairs(rng):
    wrong = [random_pairs.check(int(rng.integers(2**31)), is_computed=True) for _ in range(20)]
    found = [what for what in wrong if what is not None]
    assert not found, "\n".join(found)


def test_tables_in_calls_share_a_kernel(monkeypatch):
    """Each product has the results of its own table."""
    x, eye = jnp.asarray(PRODUCT, jnp.bfloat16), jnp.eye(72, dtype=jnp.bfloat16)
    tables = [jnp.full(72, float(i), jnp.float32) for i in range(1, 4)]
    translated = []
    original = translation.translate
    monkeypatch.setattr(
        translation, "translate", lambda *args: (translated.append(args), original(*args))[1]
    )

    def program(x):
        return [gemm(x, eye, epilogue=jax.jit(lambda z, t=t: z * t)) for t in tables]

    results = jax.jit(program)(x)
    for i, got in enumerate(results, 1):
        np.testing.assert_array_equal(got, i * PRODUCT)
    assert len(set(translated)) == 1
