"""`mlp` and `gated_mlp`: values, gradients in 16 bits, what they keep and save, errors."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_call import assert_trees_close, square_sum
from fusions import operations
from jax.sharding import PartitionSpec
from mlp_forms import (
    EACH,
    FORMS,
    TWO,
    gated,
    gated_formula,
    plain,
    plain_formula,
)
from sharded_program import mesh_of

import jax_tcgemm
from jax_tcgemm import clip, gated_mlp, mlp

pytestmark = pytest.mark.any_jax

SHAPES = [(2, 5, 6), (6, 8), (8,), (8, 3), (3,)]
EVERY = range(5)


@pytest.fixture
def args(normal):
    """Returns x, w1, b1, w2, b2; the gated forms take halves of the first layer."""
    return tuple(normal(*shape) for shape in SHAPES)


# Values


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@EACH
def test_values(normal, exact, assert_accurate, form, formula, dtype):
    args = [normal(*shape, dtype=dtype) for shape in ((2, 12, 20), (20, 18), (18,), (18, 7), (7,))]
    got = form(*args)
    assert got.dtype == dtype
    with jax.enable_x64(True):
        expected = formula(*(jnp.asarray(exact(x)) for x in args))
    assert_accurate(got, formula(*args), expected)


@pytest.mark.parametrize("activation", [None, "relu_squared", clip(-1, 1)], ids=str)
@TWO
def test_activations(args, form, formula, activation):
    f, g = (functools.partial(function, activation=activation) for function in (form, formula))
    assert_trees_close(f(*args), g(*args))
    actual = jax.grad(square_sum(f), EVERY)(*args)
    assert_trees_close(actual, jax.grad(square_sum(g), EVERY)(*args), 1e-3)


@TWO
def test_residual(args, normal, form, formula):
    for shape in ((2, 5, 3), (5, 1), ()):
        residual = normal(*shape)

        def f(residual, *args):
            return form(*args, residual=residual)

        def g(residual, *args):
            return formula(*args) + residual

        assert_trees_close(f(residual, *args), g(residual, *args))
        actual = jax.grad(square_sum(f))(residual, *args)
        assert_trees_close(actual, jax.grad(square_sum(g))(residual, *args), 1e-3)


def test_biases_are_optional(args):
    x, w1, _, w2, _ = args
    assert_trees_close(mlp(x, w1, None, w2), plain_formula(x, w1, 0, w2, 0))
    got = gated_mlp(x, w1, None, w2[:4])
    assert_trees_close(got, gated_formula(x, w1, 0, w2, 0))


@TWO
def test_float32_master_weights_get_float32_gradients(exact, normal, form, formula):
    x, *weights = (normal(*shape) for shape in ((64, 32), (32, 16), (16,), (16, 8), (8,)))
    x = x.astype(jnp.bfloat16)
    options = {"precision": "BF16_BF16_F32", "preferred_element_type": jnp.bfloat16}

    def loss(x, *weights):
        y = form(x, *weights, **options)
        assert y.dtype == jnp.bfloat16
        return jnp.sum(y.astype(jnp.float32))

    grads = jax.grad(loss, EVERY)(x, *weights)
    assert [g.dtype for g in grads] == [jnp.bfloat16] + [jnp.float32] * 4
    rounded = [x, *(w.astype(jnp.bfloat16).astype(jnp.float32) for w in weights)]
    expected = jax.grad(lambda x, *w: formula(x.astype(jnp.float32), *w).sum(), EVERY)(*rounded)
    for got, wanted in zip(grads, expected, strict=True):
        scale = np.abs(exact(wanted)).max()
        np.testing.assert_allclose(exact(got), exact(wanted), atol=0.02 * scale)
    # The gradient of the first weight is a float32 sum, not rounded to bfloat16 afterwards.
    assert not np.array_equal(grads[1], grads[1].astype(jnp.bfloat16))


# Derivatives


@EACH
def test_16_bit_gradients(normal, rng, exact, assert_accurate, form, formula):
    dtype = [jnp.bfloat16, jnp.float16][rng.integers(2)]
    shapes = ((2, 16, 24), (24, 32), (32,), (32, 8), (8,))
    args = [
        normal(*shape, dtype=dtype) / (shape[0] if len(shape) == 2 else 1) ** 0.5
        for shape in shapes
    ]
    g = normal(2, 16, 8, dtype=dtype)
    actual = jax.vjp(form, *args)[1](g)
    baseline = jax.vjp(formula, *args)[1](g)
    with jax.enable_x64(True):
        wide = [jnp.asarray(exact(x)) for x in args]
        expected = jax.vjp(formula, *wide)[1](jnp.asarray(exact(g)))
    for x, operand, y, z in zip(actual, args, baseline, expected, strict=True):
        assert x.dtype == operand.dtype
        assert_accurate(x, y, z)


@pytest.mark.parametrize(
    ("form", "count"),
    [(plain, 2), (gated, 3), (FORMS["recomputing"][0], 1), (FORMS["gated, recomputing"][0], 2)],
)
def test_what_the_reverse_pass_keeps(normal, form, count):
    args = [normal(*s, dtype=jnp.bfloat16) for s in ((16, 6), (6, 48), (48,), (48, 5), (5,))]
    columns = 24 if count == 3 or form is FORMS["gated, recomputing"][0] else 48
    _, pullback = jax.vjp(form, *args)
    saved = [x for x in jax.tree.leaves(pullback) if x.shape == (16, columns)]
    assert [x.dtype for x in saved] == [jnp.bfloat16] * count


POLICIES = jax.checkpoint_policies
BOTH_NAMES = (jax_tcgemm.PREACTIVATION, jax_tcgemm.ACTIVATION)


@pytest.mark.parametrize(
    ("options", "names", "products"),
    [
        ({}, None, 6),
        ({}, (), 7),  # recomputes the first layer
        ({}, BOTH_NAMES, 6),
        ({}, BOTH_NAMES[:1], 7),  # the activation needs the first layer again
        ({"recompute_activation": True}, BOTH_NAMES[:1], 6),
        ({"recompute_activation": True}, (), 7),
    ],
)
def test_policies_choose_what_is_computed_again(args, count_gemms, options, names, products):
    f = functools.partial(mlp, **options)
    if names is not None:
        f = jax.checkpoint(f, policy=POLICIES.save_only_these_names(*names))
    grads = jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))), EVERY)
    assert count_gemms(grads, *args) == products


def test_gradients_of_unused_operands_are_not_computed(args, count_gemms):
    loss = square_sum(plain)
    counts = [count_gemms(jax.grad(loss, argnums), *args) for argnums in ((4,), (3,), (1,), (0,))]
    assert counts == [2, 3, 4, 4]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("argnums", [(4,), (5,), (4, 5), (3, 4)])
def test_shard_map_of_what_varies_less_than_the_result(normal, argnums, recompute):
    rows, whole = PartitionSpec("x"), PartitionSpec()

    def form(x, w1, b1, w2, b2, residual):
        options = {"residual": residual, "recompute_activation": recompute}
        return mlp(x, w1, b1, w2, b2, **options)

    args = (normal(8, 6), *(normal(*shape) for shape in SHAPES[1:]), normal(3))
    sharded = jax.shard_map(form, mesh=mesh_of((4,)), in_specs=(rows, *[whole] * 5), out_specs=rows)
    actual = jax.jit(jax.grad(square_sum(sharded), argnums))(*args)
    assert_trees_close(actual, jax.grad(square_sum(form), argnums)(*args))


@pytest.mark.parametrize("loss", [jnp.sum, lambda y: jnp.sum(y * y)])
def test_named_values_are_not_computed_again(normal, loss):
    x, w1, b1, w2 = normal(4, 6), normal(6, 8), normal(8), normal(8, 3)
    names = jax_tcgemm.PREACTIVATION, jax_tcgemm.ACTIVATION
    policy = jax.checkpoint_policies.save_only_these_names(*names)

    def product_count(policy):
        layers = jax.checkpoint(lambda w1, w2: loss(mlp(x, w1, b1, w2)), policy=policy)
        counts = operations(jax.grad(layers, (0, 1)), w1, w2)
        return counts["tcgemm"]

    # The forward pass has two products. The derivative has two by weights and one by the hidden
    # layer. A loss that needs its argument has the second product once more.
    expected = 5 if loss is jnp.sum else 6
    assert product_count(policy) == expected
    assert product_count(jax.checkpoint_policies.nothing_saveable) > expected


# Errors

X, W1, W2 = jnp.zeros((4, 6)), jnp.zeros((6, 8)), jnp.zeros((8, 3))
INTEGERS = jnp.zeros((8, 8), jnp.int8)


@pytest.mark.parametrize(
    ("call", "error", "parts"),
    [
        (lambda: mlp(X, W1.T, None, W2), ValueError, ["x and w1 must agree in k, got 6 and 8"]),
        (lambda: mlp(X, W1, None, W1), ValueError, ["hidden layer and w2", "got 8 and 6"]),
        (lambda: mlp(X, W1[None], None, W2), ValueError, ["w1.shape=(1, 6, 8)", "jax.vmap"]),
        (lambda: mlp(X, W1, X, W2), ValueError, ["b1.shape=(4, 6)", "(8,)"]),
        (lambda: mlp(X, W1, None, W2, X), ValueError, ["b2.shape=(4, 6)", "(3,)"]),
        (lambda: mlp(X, W1, None, W2, residual=X), ValueError, ["residual.shape=(4, 6)", "(4, 3)"]),
        (lambda: mlp(X, W1, None, W2, activation="swish"), ValueError, ["'swish'"]),
        (lambda: mlp(X, W1, None, None), TypeError, ["w2 must be an array"]),
        (
            lambda: mlp(INTEGERS, INTEGERS, None, W2, epilogue=jnp.negative),
            TypeError,
            ["hidden layer of int8"],
        ),
        (
            lambda: gated_mlp(*[INTEGERS] * 3, W2, epilogue=jnp.add),
            TypeError,
            ["hidden layer of int8"],
        ),
        (lambda: gated_mlp(X, W1, None, W2), ValueError, ["hidden layer and w_down", "4 and 8"]),
        (lambda: gated_mlp(X, W1, W1.T, W2), ValueError, ["w_up.shape=(8, 6)"]),
        (lambda: gated_mlp(X, W1, W1, W2, bias_down=X), ValueError, ["bias_down.shape=(4, 6)"]),
        (lambda: gated_mlp(X, W1[None], W1[None], W2), ValueError, ["w_gate", "jax.vmap"]),
    ],
)
def test_errors(call, error, parts):
    with pytest.raises(error) as raised:
        call()
    for part in parts:
        assert part in str(raised.value)
