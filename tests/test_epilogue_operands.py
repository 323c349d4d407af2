"""Residuals, row and column scales, and the epilogues that only derivatives use."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_call import assert_trees_close, square_sum

from jax_tcgemm import _compat, gemm, softcap
from jax_tcgemm.primitives import gemm as gemm_primitive
from jax_tcgemm.problem.activations import resolve
from jax_tcgemm.problem.epilogue import Epilogue
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Operands

pytestmark = pytest.mark.any_jax


def call(a, b, bias, residual, row_scale, column_scale, alpha=1.0, activation="gelu"):
    return gemm(
        a,
        b,
        bias=bias,
        alpha=alpha,
        residual=residual,
        row_scale=row_scale,
        column_scale=column_scale,
        activation=activation,
    )


def formula(a, b, bias, residual, row_scale, column_scale, alpha=1.0, activation="gelu"):
    z = alpha * row_scale[..., :, None] * column_scale[..., None, :] * (a @ b)
    return resolve(activation).reference(z + bias[..., None, :]) + residual


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("activation", [None, "silu", softcap(1.5)], ids=str)
def test_values(normal, exact, assert_accurate, dtype, activation):
    a, b, residual = (normal(*shape, dtype=dtype) for shape in ((2, 12, 20), (20, 9), (2, 12, 9)))
    vectors = normal(9), normal(2, 12), normal(9)
    got = call(a, b, vectors[0], residual, *vectors[1:], activation=activation)
    assert got.dtype == dtype
    wide = [x.astype(jnp.float32) for x in (a, b, vectors[0], residual, *vectors[1:])]
    baseline = formula(*wide, activation=activation).astype(dtype)
    with jax.enable_x64(True):
        wide = [jnp.asarray(exact(x)) for x in (a, b, vectors[0], residual, *vectors[1:])]
        expected = formula(*wide, activation=activation)
    assert_accurate(got, baseline, expected)


@pytest.mark.parametrize("residual_shape", [(), (5,), (4, 1), (3, 1, 5), (2, 3, 4, 5)])
@pytest.mark.parametrize("row_shape", [(4,), (1, 4), (3, 4), (2, 1, 4)])
@pytest.mark.parametrize("column_shape", [(5,), (2, 3, 5)])
def test_shapes(normal, residual_shape, row_shape, column_shape):
    a, b, bias = normal(2, 3, 4, 6), normal(3, 6, 5), normal(5)
    rest = normal(*residual_shape), normal(*row_shape), normal(*column_shape)
    assert_trees_close(call(a, b, bias, *rest), formula(a, b, bias, *rest))


@pytest.mark.parametrize("activation", [None, "tanh"])
def test_c_and_residual(normal, activation):
    a, b, c, residual = normal(4, 6), normal(6, 5), normal(4, 5), normal(5)

    def f(a, b, c, residual):
        return gemm(a, b, c, residual=residual, beta=-0.5, activation=activation)

    def g(a, b, c, residual):
        return resolve(activation).reference(a @ b - 0.5 * c) + residual

    args = (a, b, c, residual)
    assert_trees_close(f(*args), g(*args))
    actual = jax.grad(square_sum(f), range(4))(*args)
    assert_trees_close(actual, jax.grad(square_sum(g), range(4))(*args))


def test_beta_is_not_the_residuals(normal):
    a, b, residual = normal(4, 6), normal(6, 5), normal(4, 5)
    for beta in (3.0, jnp.float32(3)):
        for activation in (None, "relu"):
            got = gemm(a, b, residual=residual, beta=beta, activation=activation)
            expected = gemm(a, b, activation=activation) + residual
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_integers(normal):
    a, b = normal(4, 5, dtype=jnp.int32), normal(5, 3, dtype=jnp.int32)
    rows, columns = normal(4, dtype=jnp.int32), normal(3, dtype=jnp.int32)
    got = gemm(a, b, residual=7, row_scale=rows, column_scale=columns)
    np.testing.assert_array_equal(got, rows[:, None] * columns * (a @ b) + 7)


@pytest.mark.parametrize(
    ("changes", "error", "parts"),
    [
        ({"residual": jnp.ones((5, 4))}, ValueError, ["residual.shape=(5, 4)", "(4, 5)"]),
        ({"row_scale": jnp.ones(5)}, ValueError, ["row_scale.shape=(5,)", "(4,)"]),
        ({"row_scale": jnp.ones(())}, ValueError, ["row_scale.shape=()", "(4,)"]),
        ({"column_scale": jnp.ones((4, 5))}, ValueError, ["column_scale.shape=(4, 5)", "(5,)"]),
        ({"column_scale": 1j * jnp.ones(5)}, TypeError, ["column_scale.dtype=complex64"]),
        ({"residual": "x"}, TypeError, ["residual", "'x'"]),
    ],
)
def test_errors(changes, error, parts):
    with pytest.raises(error) as raised:
        gemm(jnp.ones((4, 6)), jnp.ones((6, 5)), **changes)
    for part in parts:
        assert part in str(raised.value)


# Derivatives


def test_gradients_have_the_operands_dtypes(normal):
    a, b = normal(4, 6, dtype=jnp.bfloat16), normal(6, 5, dtype=jnp.bfloat16)
    rest = normal(5), normal(4, 5), normal(4), normal(5, dtype=jnp.float16)
    grads = jax.grad(square_sum(call), range(6))(a, b, *rest)
    assert [x.dtype for x in grads] == [x.dtype for x in (a, b, *rest)]


def test_gradients_of_scales_share_a_product(normal):
    shapes = (2, 5, 7), (7, 3), (3,), (5, 3), (5,), (3,), ()
    args = [normal(*shape) for shape in shapes]
    every = jax.jit(jax.grad(square_sum(call), (4, 5, 6))).lower(*args)
    assert every.as_text().count("dot_general") == 4
    assert every.compile().as_text().count(" dot(") == 1  # the forward product is the same, too


def test_unread_results_are_dropped(normal, cuda_module):
    a, b, residual = (jnp.zeros(shape, jnp.bfloat16) for shape in ((8, 8), (8, 8), (8, 8)))

    def f(a, b, residual):
        return gemm(a, b, residual=residual, activation="gelu")

    _, (forward,) = cuda_module(lambda *x: jax.vjp(f, *x)[0], a, b, residual)
    assert (forward["has_aux"], forward["c_role"]) == (False, "residual")
    # The derivative needs neither the result nor the residual.
    _, (forward, _) = cuda_module(lambda *x: jax.vjp(f, *x)[1](a)[0], a, b, residual)
    assert (forward["has_aux"], forward["has_c"], forward["activation"]) == (False, False, "")
    assert len(forward["operands"]) == 2


# The roles of C that transposes of layers bind


def bound(a, b, c, c2=None, *, activation="gelu", dtype=None):
    present = (tuple(range(x.ndim)) for x in (a, b, c))
    axes = dict(zip("abc", present, strict=True))
    spec = GemmSpec(
        Operands(**axes, c2=None if c2 is None else (0, 1)),
        jnp.dtype(dtype or a.dtype),
        _compat.canonicalize_precision(None),
        Epilogue("derivative" if c2 is None else "gated_derivative", activation),
    )
    return gemm_primitive.bind(Operands(a, b, c=c, c2=c2), spec)


def composed(a, b, c, c2=None, *, activation="gelu"):
    f = resolve(activation)
    if c2 is None:
        return [(a @ b) * f.derivative(c)]
    return [(a @ b) * c2 * f.derivative(c), (a @ b) * f.reference(c)]


@pytest.mark.parametrize("count", [3, 4])
def test_linear_transpose_of_derivative_roles(normal, count):
    args = [normal(4, 6), normal(6, 5), normal(4, 5), normal(4, 5)][:count]
    cotangents = [normal(4, 5) for _ in bound(*args)]
    for i in (0, 1):

        def along(f, x, i=i):
            return f(*args[:i], x, *args[i + 1 :])

        (actual,) = jax.linear_transpose(functools.partial(along, bound), args[i])(cotangents)
        (expected,) = jax.linear_transpose(functools.partial(along, composed), args[i])(cotangents)
        assert_trees_close(actual, expected)


def test_derivative_roles_round_once(normal, exact):
    a, b, c = (normal(*shape, dtype=jnp.bfloat16) for shape in ((8, 16), (16, 8), (8, 8)))
    (got,) = bound(a, b, c)
    with jax.enable_x64(True):
        (expected,) = composed(*(jnp.asarray(exact(x)) for x in (a, b, c)))
    np.testing.assert_allclose(exact(got), expected, rtol=1.01 * 2**-8, atol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
def test_python_numbers_among_operands_are_weakly_typed(normal, dtype):
    a, b = normal(4, 6), normal(6, 5)
    for number in (2, jnp.asarray(2)):
        y = gemm(a, b, epilogue=lambda z, s: z.astype(dtype) * s, epilogue_operands=(number,))
        assert y.dtype == ((a @ b).astype(dtype) * number).dtype
