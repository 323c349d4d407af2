"""The passes that compute cotangents of epilogues, divided among devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_checks import both, is_divided, kinds, moved, put
from sharded_program import mesh_of

from jax_tcgemm import gemm
from jax_tcgemm.primitives.epilogue_derivative import activation_tangent

PULLBACK = "tcgemm_epilogue_pullback"

pytestmark = pytest.mark.usefixtures("divided_everywhere")


def cotangents(g, z, bias):
    """Returns the cotangents of a layer's pre-activation and of its bias."""
    return jax.linear_transpose(
        lambda t, bias: activation_tangent("gelu", z, t, bias), jnp.zeros_like(z), bias
    )(g)


LAYOUTS = {
    "rows": (P("x"), P()),
    "columns": (P(None, "x"), P("x")),
    "both": (P("y", "x"), P("x")),
    "rows by all": (P(("x", "y")), P()),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", [(), (3,)])
def test_each_device_computes_its_part(normal, layout, batch):
    matrix, row = LAYOUTS[layout]
    matrix = P(*(None,) * len(batch), *matrix)
    g, z = (put(mesh_of(), normal(*batch, 64, 48), *matrix) for _ in range(2))
    bias = put(mesh_of(), normal(48), *row)
    assert is_divided(cotangents, g, z, bias, primitive=PULLBACK)
    summed = {"all-reduce"} if layout != "columns" else set()
    assert set(kinds(cotangents, g, z, bias)) == summed
    for got, expected in zip(*both(cotangents, g, z, bias), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_sums_are_rounded_once(normal):
    """Each device's sum is 513; bfloat16 would round it to 512."""
    z = put(mesh_of(), jnp.ones((4 * 513, 8), jnp.bfloat16), "x")
    bias = put(mesh_of(), jnp.zeros(8, jnp.bfloat16))

    def sums(z, bias):
        return jax.linear_transpose(
            lambda t, bias: activation_tangent("relu", z, t, bias), jnp.zeros_like(z), bias
        )(z)[1]

    assert is_divided(sums, z, bias, primitive=PULLBACK)
    assert float(jax.jit(sums)(z, bias)[0]) == float(jnp.bfloat16(4 * 513))


@pytest.mark.parametrize("rows", [61, 33, 17])
def test_sums_over_rows_of_other_sizes(normal, rows):
    """XLA pads the parts; with 33 and 17 rows, a part is nothing but padding."""
    g, z, bias = normal(64, 48), normal(64, 48), put(mesh_of(), normal(48))
    # Beyond the rows there are numbers that would show.
    g, z = (put(mesh_of(), x.at[rows:].set(jnp.nan), "x") for x in (g, z))

    def cut(g, z, bias):
        of_rows, sums = cotangents(g[:rows], z[:rows], bias)
        return jax.lax.with_sharding_constraint(of_rows, NamedSharding(mesh_of(), P("x"))), sums

    assert is_divided(cut, g, z, bias, primitive=PULLBACK)
    gathered = [size for kind, size in moved(cut, g, z, bias) if kind == "all-gather"]
    assert sum(gathered) < g.nbytes  # not both matrices
    for got, expected in zip(*both(cut, g, z, bias), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_cotangents_of_a_function(normal):
    """Rows, columns and a number have cotangents; the residual's is the cotangent itself."""

    def layer(x, w, row, column, scalar, residual):
        def f(acc, row, column, scalar, residual):
            return jnp.tanh(acc * row + column) * scalar + residual

        operands = (row, column, scalar, residual)
        return gemm(x, w, epilogue=f, epilogue_operands=operands)

    def program(*values):
        return jax.grad(lambda *x: jnp.sin(layer(*x)).sum(), range(len(values)))(*values)

    x, w = put(mesh_of(), normal(64, 32), "y"), put(mesh_of(), normal(32, 48), None, "x")
    row, column = put(mesh_of(), normal(64, 1), "y"), put(mesh_of(), normal(48), "x")
    scalar, residual = put(mesh_of(), normal()), put(mesh_of(), normal(64, 48), "y", "x")
    assert is_divided(program, x, w, row, column, scalar, residual, primitive=PULLBACK)
    assert "all-gather" not in kinds(program, x, w, row, column, scalar, residual)
    pairs = zip(*both(program, x, w, row, column, scalar, residual), strict=True)
    for got, expected in pairs:
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
