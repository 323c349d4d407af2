"""`gated_gemm`: values, batches, gradients in 16 bits, what it keeps and saves, errors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_call import assert_trees_close, square_sum

import jax_tcgemm
from jax_tcgemm import _compat, clip, gated_gemm, gated_mlp
from jax_tcgemm.lowering import reference
from jax_tcgemm.problem.activations import resolve
from jax_tcgemm.problem.epilogue import Epilogue
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Operands

pytestmark = pytest.mark.any_jax

FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32)


def fused(x, w_gate, w_up, bias_gate=None, bias_up=None, activation="silu"):
    """`gated_gemm` with `w_gate` and `w_up` as two weights."""
    return gated_gemm(x, w_gate, w_up, bias_gate=bias_gate, bias_up=bias_up, activation=activation)


def packed(x, w_gate, w_up, bias_gate=None, bias_up=None, activation="silu"):
    """`gated_gemm` with one weight that holds both."""
    both = jnp.concatenate([w_gate, w_up], -1)
    return gated_gemm(x, both, bias_gate=bias_gate, bias_up=bias_up, activation=activation)


def packed_transposed(x, w_gate, w_up, bias_gate=None, bias_up=None, activation="silu"):
    both = jnp.concatenate([w_gate.mT, w_up.mT], -2)
    return gated_gemm(
        x, both, bias_gate=bias_gate, bias_up=bias_up, activation=activation, transpose_w=True
    )


def formula(x, w_gate, w_up, bias_gate=None, bias_up=None, activation="silu"):
    return gate_of(x @ w_gate, x @ w_up, bias_gate, bias_up, activation)


def formula_of_packed(x, w_gate, w_up, bias_gate=None, bias_up=None, activation="silu"):
    """`formula` with one product: XLA's order of summation depends on columns and layout."""
    products = jnp.split(x @ jnp.concatenate([w_gate, w_up], -1), 2, -1)
    return gate_of(*products, bias_gate, bias_up, activation)


def formula_of_packed_transposed(x, w_gate, w_up, bias_gate=None, bias_up=None, activation="silu"):
    products = jnp.split(x @ jnp.concatenate([w_gate.mT, w_up.mT], -2).mT, 2, -1)
    return gate_of(*products, bias_gate, bias_up, activation)


def gate_of(gate, up, bias_gate, bias_up, activation):
    gate = gate if bias_gate is None else gate + bias_gate[..., None, :]
    up = up if bias_up is None else up + bias_up[..., None, :]
    return resolve(activation).reference(gate) * up


FORMULAS = {
    fused: formula,
    packed: formula_of_packed,
    packed_transposed: formula_of_packed_transposed,
}
FORMS = pytest.mark.parametrize("form", [*FORMULAS])


@pytest.fixture
def args(normal):
    return normal(2, 5, 7), normal(7, 3), normal(7, 3), normal(3), normal(3)


# Values


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("activation", [None, "silu", "gelu_exact", clip(-1, 1)], ids=str)
@FORMS
def test_values(normal, exact, assert_accurate, form, dtype, activation):
    shapes = (2, 12, 20), (20, 9), (20, 9), (9,), (2, 9)
    args = [normal(*shape, dtype=dtype) for shape in shapes]
    got = form(*args, activation=activation)
    assert got.dtype == dtype
    wide = [x.astype(jnp.float32) for x in args]
    own_formula = jax.jit(FORMULAS[form], static_argnames="activation")
    baseline = own_formula(*wide, activation=activation).astype(dtype)
    with jax.enable_x64(True):
        wide = [jnp.asarray(exact(x)) for x in args]
        expected = formula(*wide, activation=activation)
    assert_accurate(got, baseline, expected)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@FORMS
def test_rounds_once(normal, exact, form, dtype):
    args = [normal(*shape, dtype=dtype) for shape in ((16, 32), (32, 24), (32, 24))]
    expected = formula(*(jnp.asarray(exact(x), jnp.float32) for x in args))
    spacing = np.abs(exact(expected)) * float(jnp.finfo(dtype).eps) / 2
    assert np.all(np.abs(exact(form(*args)) - exact(expected)) <= 1.01 * spacing + 1e-5)


@pytest.mark.parametrize(
    ("x_batch", "w_batch", "bias_batch"),
    [((), (), ()), ((3,), (), (3,)), ((), (3,), ()), ((2, 3), (3,), (2, 1)), ((2, 1), (1, 3), ())],
)
@FORMS
def test_batches(normal, form, x_batch, w_batch, bias_batch):
    w = normal(*w_batch, 6, 5), normal(*w_batch, 6, 5)
    args = (normal(*x_batch, 4, 6), *w, normal(*bias_batch, 5), normal(5))
    assert_trees_close(form(*args), formula(*args))
    every = range(5)
    actual = jax.grad(square_sum(form), every)(*args)
    assert_trees_close(actual, jax.grad(square_sum(formula), every)(*args), 1e-3)


@pytest.mark.parametrize("shape", [(0, 3, 4), (1, 1, 1), (3, 0, 4), (3, 4, 0)])
def test_empty_and_single(normal, shape):
    m, n, k = shape
    args = normal(m, k), normal(k, n), normal(k, n), normal(n)
    for form in (fused, packed):
        assert_trees_close(form(*args), formula(*args))


@pytest.mark.parametrize("preferred", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_preferred_element_type(normal, preferred):
    x, w, v = (normal(*shape, dtype=jnp.bfloat16) for shape in ((6, 40), (40, 7), (40, 7)))
    got = gated_gemm(x, w, v, preferred_element_type=preferred)
    assert got.dtype == preferred
    expected = formula(*(y.astype(jnp.float32) for y in (x, w, v)))
    eps = float(jnp.finfo(preferred).eps)
    np.testing.assert_allclose(np.float32(got), expected, rtol=max(eps, 1e-4), atol=1e-4)


def test_float32_master_weights_get_float32_gradients(normal):
    x, w, v = normal(6, 40, dtype=jnp.bfloat16), normal(40, 7), normal(40, 7)

    def loss(x, w, v):
        options = {"precision": "BF16_BF16_F32", "preferred_element_type": jnp.bfloat16}
        y = gated_gemm(x, w, v, **options)
        assert y.dtype == jnp.bfloat16
        return y.astype(jnp.float32).sum()

    grads = jax.grad(loss, (0, 1, 2))(x, w, v)
    assert [g.dtype for g in grads] == [jnp.bfloat16, jnp.float32, jnp.float32]
    # The gradients are not rounded to bfloat16 in between.
    assert not np.array_equal(grads[1], grads[1].astype(jnp.bfloat16))


def test_a_factor(normal, exact):
    a, b, c = normal(5, 7), normal(7, 3), normal(5, 3)
    whole = (0, 1)
    spec = GemmSpec(
        Operands(whole, whole, c=whole),
        jnp.dtype(jnp.float32),
        _compat.canonicalize_precision("highest"),
        Epilogue("factor", "silu"),
    )
    (got,) = reference.reference_gemm(a, b, c, spec=spec)
    z = exact(a) @ exact(b)
    np.testing.assert_allclose(got, z / (1 + np.exp(-z)) * exact(c), rtol=1e-5, atol=1e-5)


# Derivatives


@FORMS
def test_16_bit_gradients(normal, rng, exact, assert_accurate, form):
    dtype = [jnp.bfloat16, jnp.float16][rng.integers(2)]
    args = [normal(*shape, dtype=dtype) for shape in ((2, 16, 24), (24, 8), (24, 8))]
    args[1], args[2] = args[1] / 4, args[2] / 4
    g = normal(2, 16, 8, dtype=dtype)
    actual = jax.vjp(form, *args)[1](g)
    baseline = jax.vjp(formula, *args)[1](g)
    with jax.enable_x64(True):
        expected = jax.vjp(formula, *(jnp.asarray(exact(x)) for x in args))[1](
            jnp.asarray(exact(g))
        )
    for x, operand, y, z in zip(actual, args, baseline, expected, strict=True):
        assert x.dtype == operand.dtype
        assert_accurate(x, y, z)


def test_reverse_pass_keeps_two_residuals_of_the_result_type(normal):
    args = [normal(*shape, dtype=jnp.bfloat16) for shape in ((16, 24), (24, 8), (24, 8))]
    _, pullback = jax.vjp(fused, *args)
    saved = [x for x in jax.tree.leaves(pullback) if x.shape == (16, 8)]
    assert [x.dtype for x in saved] == [jnp.bfloat16] * 2


def test_linear_transpose_of_layers_in_the_second_weight(normal):
    x, w, u, v, g = normal(4, 6), normal(6, 8), normal(6, 8), normal(8, 5), normal(4, 5)
    (actual,) = jax.linear_transpose(lambda u: gated_mlp(x, w, u, v), u)(g)
    (expected,) = jax.linear_transpose(lambda u: (jax.nn.silu(x @ w) * (x @ u)) @ v, u)(g)
    assert_trees_close(actual, expected)


def test_batch_of_biases_needs_one_pair_of_products(args, normal):
    biases = normal(4, 3)
    f = jax.vmap(fused, (None, None, None, 0, None))
    text = jax.jit(f).lower(*args[:3], biases, args[4]).as_text()
    assert text.count("dot_general") == 2
    assert "tensor<4x2x5x7x" not in text


def test_policy_decides_whether_products_are_computed_again(args, count_gemms):
    def grads(policy):
        f = jax.checkpoint(fused, policy=policy)
        return jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))), (0, 1, 2))

    policies = jax.checkpoint_policies
    saved = count_gemms(grads(policies.save_only_these_names(jax_tcgemm.PREACTIVATION)), *args[:3])
    again = count_gemms(grads(policies.nothing_saveable), *args[:3])
    assert (saved, again) == (6, 8)


# Errors

X, W = jnp.zeros((4, 6)), jnp.zeros((6, 5))
LINEAR = {"activation": None, "preferred_element_type": jnp.float32}


@pytest.mark.parametrize(
    ("arguments", "changes", "error", "parts"),
    [
        ((X, W.T, W), {}, ValueError, ["x and w_gate must agree in k, got 6 and 5"]),
        ((X, W, W.T), {}, ValueError, ["w_up.shape=(5, 6)", "w_gate.shape=(6, 5)"]),
        ((X, W, W.astype(jnp.bfloat16)), {}, TypeError, ["w_up.dtype=bfloat16", "float32"]),
        ((X, W), {}, ValueError, ["w_gate.shape=(6, 5)", "extent 5 must be even"]),
        ((X, W.T, W.T), {"transpose_w": 1}, TypeError, ["transpose_w=1"]),
        ((X, W, W), {"bias_gate": jnp.zeros(4)}, ValueError, ["bias_gate.shape=(4,)", "(5,)"]),
        ((X, W, W), {"bias_up": jnp.zeros((4, 5))}, ValueError, ["bias_up.shape=(4, 5)"]),
        ((X, jnp.zeros((6, 8))), {"bias_up": jnp.zeros(8)}, ValueError, ["(8,)", "(4,)"]),
        ((X, W, W), {"activation": "swish"}, ValueError, ["activation='swish'", "silu"]),
        ((X, W, W), {"config": 3}, TypeError, ["config=3"]),
        ((X, W, W), {"config": "fast"}, ValueError, ["config='fast'", "TF32_TF32_F32"]),
        ((X * 1j, W, W), LINEAR, TypeError, ["real operands", "complex64"]),
        ((X[0], W, W), {}, ValueError, ["x must have at least 2 dimensions"]),
        ((X, None), {}, TypeError, ["w_gate must be an array"]),
        ((jnp.zeros((3, 4, 6)), jnp.zeros((2, 6, 4))), {}, ValueError, ["x and w_gate"]),
    ],
)
def test_errors(arguments, changes, error, parts):
    with pytest.raises(error) as raised:
        gated_gemm(*arguments, **changes)
    for part in parts:
        assert part in str(raised.value)
