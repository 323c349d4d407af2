"""Programs over eight devices, partitioned by the rules of ``partitioning``, as on GPUs.

The same program of ``jax.numpy`` is the limit: no more bytes travel, nothing else is gathered, and
results have the same shardings.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sharded_checks import compiled_gradients, compiled_results, gradients_of, placed
from sharded_program import TARGET, mesh_of
from sharded_programs import KINDS, PROGRAMS

from jax_tcgemm.tools.collectives import collectives

pytestmark = pytest.mark.usefixtures("divided_everywhere")


def gathers(moved):
    return sum(kind == "all-gather" for kind, _ in moved)


def size(moved):
    return sum(size for _, size in moved)


def check(program, ours, theirs, operands, exact, assert_accurate):
    mine, other = (collectives(each.as_text(), 8) for each in (ours, theirs))
    assert gathers(mine) <= gathers(other), (mine, other)
    assert size(mine) <= size(other), (mine, other)
    results = [jax.tree.leaves(each(*operands)) for each in (ours, theirs)]
    with jax.enable_x64(True):
        wide = [
            np.asarray(x) if i in program.sizes else np.asarray(x, np.float64)
            for i, x in enumerate(operands)
        ]
        expected = jax.tree.leaves(jax.jit(exact)(*wide))
    for actual, baseline, value in zip(*results, expected, strict=True):
        assert actual.sharding.is_equivalent_to(baseline.sharding, actual.ndim)
        assert actual.dtype == baseline.dtype
        scale = float(np.abs(value).max()) * float(jnp.finfo(actual.dtype).eps)
        assert_accurate(actual, baseline, value, slack=scale)


@pytest.mark.any_jax
@pytest.mark.parametrize("name", PROGRAMS)
def test_results(name, rng, assert_accurate):
    program, mesh = PROGRAMS[name], mesh_of()
    operands = placed(program, mesh, rng)
    assert TARGET in jax.jit(lambda *x: program.ours(*x)).lower(*operands).as_text()
    ours, theirs = (
        compiled_results(f, program, mesh, operands) for f in (program.ours, program.theirs)
    )
    check(program, ours, theirs, operands, program.theirs, assert_accurate)


@pytest.mark.parametrize(
    "name",
    [
        name if name in KINDS else pytest.param(name, marks=pytest.mark.any_jax)
        for name, each in PROGRAMS.items()
        if each.gradients
    ],
)
def test_gradients(name, rng, assert_accurate):
    program, mesh = PROGRAMS[name], mesh_of()
    operands = placed(program, mesh, rng)
    ours, theirs = (
        compiled_gradients(f, program, mesh, operands) for f in (program.ours, program.theirs)
    )
    exact = gradients_of(program.theirs, program)
    check(program, ours, theirs, operands, exact, assert_accurate)
