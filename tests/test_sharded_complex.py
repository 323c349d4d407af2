"""Products of complex64 over eight devices, partitioned by the rules of ``partitioning``."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from fused_call import assert_trees_close
from jax import lax
from jax.sharding import PartitionSpec as P
from sharded_checks import kinds, put, size
from sharded_program import TARGET, mesh_of

from jax_tcgemm import dot_general, gemm

pytestmark = [pytest.mark.any_jax, pytest.mark.usefixtures("divided_everywhere")]


def fused(x, w, bias):
    return gemm(x, w, bias=bias, conjugate_a=True, alpha=0.5 - 1j)


def fused_formula(x, w, bias):
    return (0.5 - 1j) * jnp.matmul(jnp.conj(x), w) + bias


HEADS = (((3,), (3,)), ((0, 2), (0, 2)))  # bqhd,bkhd->bhqk


@pytest.mark.parametrize(
    ("ours", "theirs", "shapes", "specs"),
    [
        *(
            (fused, fused_formula, ((64, 32), (32, 48), (48,)), specs)
            for specs in (
                (P("x"), P(), P()),
                (P("y"), P(None, "x"), P("x")),
                (P(None, "x"), P("x"), P()),
                (P("y", "x"), P("x"), P()),
            )
        ),
        (gemm, jnp.matmul, ((61, 30), (30, 43)), (P(), P())),
        (
            functools.partial(dot_general, dimension_numbers=HEADS),
            functools.partial(lax.dot_general, dimension_numbers=HEADS),
            ((4, 16, 8, 32), (4, 24, 8, 32)),
            (P("x", None, "y"), P("x", None, "y")),
        ),
    ],
    ids=["rows", "rows and columns", "k", "rows and k", "whole", "heads"],
)
def test_results_and_gradients(normal, ours, theirs, shapes, specs):
    operands = [
        put(mesh_of(), normal(*shape, dtype=jnp.complex64) / 4, *spec)
        for shape, spec in zip(shapes, specs, strict=True)
    ]

    def both(function):
        def loss(*operands):
            return jnp.sum(jnp.abs(function(*operands)) ** 2)

        return lambda *operands: (function(*operands), jax.grad(loss, (0, 1))(*operands))

    assert TARGET in jax.jit(ours).lower(*operands).as_text()
    assert_trees_close(*(jax.jit(both(f))(*operands) for f in (ours, theirs)))
    found, wanted = (kinds(f, *operands) for f in (ours, theirs))
    assert found.count("all-gather") <= wanted.count("all-gather"), (found, wanted)
    assert size(ours, *operands) <= size(theirs, *operands)
