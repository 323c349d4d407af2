"""`dot_general` under JAX transformations and as a hook of other libraries, against `lax`'s."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_call import assert_trees_close, square_sum
from jax import lax

from jax_tcgemm import dot_general

PLAIN = (((1,), (0,)), ((), ()))

# Shapes and dimension numbers: a dense layer, a projection to heads and back, attention's two
# products, two separate row or column dimensions, contraction dimensions in another order, vectors.
CASES = [
    ((2, 5, 8), (8, 3), (((2,), (0,)), ((), ()))),
    ((2, 5, 8), (8, 3, 4), (((2,), (0,)), ((), ()))),
    ((2, 5, 3, 4), (3, 4, 8), (((2, 3), (0, 1)), ((), ()))),
    ((2, 6, 3, 4), (2, 5, 3, 4), (((3,), (3,)), ((0, 2), (0, 2)))),
    ((2, 3, 6, 5), (2, 5, 3, 4), (((3,), (1,)), ((0, 1), (0, 2)))),
    ((2, 4, 3), (4, 5), (((1,), (0,)), ((), ()))),
    ((5, 4), (2, 4, 3), (((1,), (1,)), ((), ()))),
    ((2, 4, 3), (3, 5, 2), (((0, 2), (2, 0)), ((), ()))),
    ((4,), (2, 4, 3), (((0,), (1,)), ((), ()))),
    ((2, 3, 4), (4,), (((2,), (0,)), ((), ()))),
]
BY_CASE = pytest.mark.parametrize(("lhs", "rhs", "dimension_numbers"), CASES)


def gemms(function, *args) -> int:
    return str(jax.make_jaxpr(function)(*args)).count("= tcgemm[")


@BY_CASE
def test_gradients(normal, lhs, rhs, dimension_numbers):
    args = normal(*lhs), normal(*rhs)

    def pullback(function):
        out, pullback = jax.vjp(lambda x, y: function(x, y, dimension_numbers), *args)
        return out, pullback(jnp.cos(out))

    assert gemms(lambda: pullback(dot_general)) == 3
    assert_trees_close(jax.jit(lambda: pullback(dot_general))(), pullback(lax.dot_general))


def test_16_bit_gradients(normal, exact, assert_accurate):
    x, w = normal(2, 16, 24, dtype=jnp.bfloat16), normal(24, 2, 4, dtype=jnp.bfloat16)
    g = normal(2, 16, 2, 4)

    def pullback(function):
        def f(x, w):
            return function(x, w, (((2,), (0,)), ((), ())), preferred_element_type=jnp.float32)

        return jax.vjp(f, x, w)[1](g)

    truth = (
        np.einsum("btho,fho->btf", exact(g), exact(w)),
        np.einsum("btho,btf->fho", exact(g), exact(x)),
    )
    by_lax = pullback(lax.dot_general)
    for got, baseline, z in zip(pullback(dot_general), by_lax, truth, strict=True):
        assert got.dtype == jnp.bfloat16
        assert_accurate(got, baseline, z)


def test_integer_operand_has_no_gradient(normal):
    a, b = normal(3, 4, dtype=jnp.int8), normal(4, 5)

    def gradients(function):
        f = square_sum(lambda a, b: function(a, b, PLAIN))
        return jax.grad(f, argnums=(0, 1), allow_int=True)(a, b)

    (a_bar, b_bar), (_, expected) = gradients(dot_general), gradients(lax.dot_general)
    assert a_bar.dtype == jax.dtypes.float0
    assert_trees_close(b_bar, expected)


MAPPED = list(itertools.product((None, 0, 1, 2, 3), repeat=2))[1:]


@pytest.mark.parametrize(("lhs_axis", "rhs_axis"), MAPPED)
def test_vmap(normal, lhs_axis, rhs_axis):
    shapes = [(5, 3, 4), (3, 4, 8)]
    args = [
        normal(*(shape if axis is None else np.insert(shape, axis, 2)))
        for shape, axis in zip(shapes, (lhs_axis, rhs_axis), strict=True)
    ]

    def mapped(function):
        def f(x, y):
            return function(x, y, (((1, 2), (0, 1)), ((), ())))

        return jax.vmap(f, (lhs_axis, rhs_axis))

    assert gemms(mapped(dot_general), *args) == 1
    assert_trees_close(mapped(dot_general)(*args), mapped(lax.dot_general)(*args))


def test_nested_vmap_of_vectors_is_one_product(normal, cuda_module):
    """A matrix times a stack of vectors is one product of two matrices; nothing is moved."""

    def f(matrix, vectors):
        return jax.vmap(lambda v: dot_general(matrix, v, (((1,), (0,)), ((), ()))))(vectors)

    text, (call,) = cuda_module(f, normal(7, 12), normal(9, 12))
    assert "stablehlo.transpose" not in text
    assert (call["m"], call["n"], call["k"], call["batch_shape"]) == (9, 7, 12, [])


@pytest.mark.parametrize("preferred", [None, jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("dtypes", [(None, None), (None, jnp.float32), (None, jnp.bfloat16)])
def test_types_are_those_of_lax(preferred, dtypes):
    """This includes weak types: `jnp.full` without a dtype returns one."""
    args = [jnp.full((4, 4), 2.0, dtype) for dtype in dtypes]

    def types(function):
        f = lambda x, y: function(x, y, PLAIN, preferred_element_type=preferred)  # noqa: E731
        result = f(*args)
        shape = jax.eval_shape(f, *args)
        return jax.typeof(result), shape.shape, shape.dtype, shape.weak_type

    assert types(dot_general) == types(lax.dot_general)


def test_numpy_operands_and_disabled_jit(rng):
    lhs, rhs = rng.standard_normal((3, 4)), rng.standard_normal((4, 5))
    got = dot_general(lhs, rhs, ([[1], [0]], [[], []]))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, lhs @ rhs, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dot_general(lhs, rhs, ((1, 0), ((), ()))), got)
    with jax.disable_jit():
        np.testing.assert_allclose(dot_general(lhs, rhs, PLAIN), got, rtol=1e-6)


# Hooks


@pytest.mark.parametrize(
    ("subscripts", "shapes"),
    [
        ("bqhd,bkhd->bhqk", [(2, 6, 3, 4), (2, 5, 3, 4)]),
        ("bhqk,bkhd->bqhd", [(2, 3, 6, 5), (2, 5, 3, 4)]),
        ("ij,jk,kl->il", [(3, 4), (4, 5), (5, 6)]),
    ],
)
def test_einsum(normal, subscripts, shapes):
    args = [normal(*shape) for shape in shapes]

    def f(*args):
        return jnp.einsum(subscripts, *args, _dot_general=dot_general)

    assert gemms(f, *args) == len(shapes) - 1
    assert_trees_close(f(*args), jnp.einsum(subscripts, *args))


def test_flax(normal):
    pytest.importorskip("flax")
    from flax import linen, nnx

    x = normal(2, 5, 8)

    def outputs(function, x):
        hook = {"dot_general": function}
        hooks = {"qkv_dot_general": function, "out_dot_general": function, "decode": False}
        rngs = nnx.Rngs(0)
        layers = [
            nnx.Linear(8, 3, rngs=rngs, **hook),
            nnx.LinearGeneral(8, (2, 3), rngs=rngs, preferred_element_type=jnp.float32, **hook),
            nnx.LinearGeneral((5, 8), 3, axis=(1, 2), rngs=rngs, **hook),
            nnx.MultiHeadAttention(2, 8, rngs=rngs, **hooks),
        ]
        functional = [linen.Dense(3, **hook), linen.Dense(3, dot_general_cls=lambda: function)]
        key = jax.random.key(0)
        return [
            *(layer(x) for layer in layers),
            *(layer.init_with_output(key, x)[0] for layer in functional),
        ]

    assert gemms(lambda x: outputs(dot_general, x), x) == 3 + 4 + 2
    assert_trees_close(outputs(dot_general, x), outputs(lax.dot_general, x))
