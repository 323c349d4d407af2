"""``fuse`` of random functions, in which intermediate values leave a region and come back."""

from __future__ import annotations

import pytest
from fusions import operands, random_function, worst_of_random
from nightly import slow

pytestmark = pytest.mark.any_jax

SIZE = 80  # kernels of this size have epilogues


@pytest.mark.parametrize("part", range(8))
def test_random_functions(rng, part):
    function, args = random_function(rng), operands(rng, SIZE)
    assert worst_of_random(function, args) <= 1, function


@pytest.mark.parametrize("part", [0, 1, slow(2), slow(3)])
def test_gradients_of_random_functions(rng, part):
    function, args = random_function(rng), operands(rng, SIZE)
    assert worst_of_random(function, args, gradient=True) <= 1, function
