"""``fuse`` of random functions, in which values leave a region on the way and come back."""

from __future__ import annotations

import jax
import pytest
from fusions import loss_of, operands, random_function, worst

from jax_tcgemm import fuse

pytestmark = pytest.mark.any_jax

SIZE = 80  # of which kernels have epilogues


@pytest.mark.parametrize("part", range(8))
def test_random_functions(rng, part):
    function, args = random_function(rng), operands(rng, SIZE)
    assert worst(function, fuse(function), args) <= 1, function


@pytest.mark.parametrize("part", range(4))
def test_gradients_of_random_functions(rng, part):
    function, args = random_function(rng), operands(rng, SIZE)
    gradient = jax.value_and_grad(loss_of(function), argnums=(0, 1))
    assert worst(gradient, fuse(gradient), args) <= 1, function
