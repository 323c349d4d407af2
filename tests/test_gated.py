"""`gated_gemm`: values, derivatives, transformations, errors."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_call import assert_trees_close, square_sum
from jax.sharding import PartitionSpec
from jax.test_util import check_grads

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


@pytest.mark.any_jax
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


@pytest.mark.any_jax
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


@pytest.mark.any_jax
@pytest.mark.parametrize("activation", [None, "gelu", clip(-3, 3)], ids=str)
@pytest.mark.parametrize("form", [fused, packed])
def test_derivatives_against_finite_differences(rng, form, activation):
    with jax.enable_x64(True):
        shapes = [(2, 3, 4), (4, 3), (4, 3), (3,), (2, 3)]
        args = [jnp.asarray(rng.uniform(-1, 1, shape)) for shape in shapes]
        check_grads(functools.partial(form, activation=activation), args, order=2)


def test_second_order_in_float32(rng):
    args = [jnp.asarray(rng.uniform(-1, 1, s), jnp.float32) for s in ((3, 4), (4, 3), (4, 3))]
    with jax.default_matmul_precision("highest"):
        check_grads(fused, args, order=2, rtol=1e-2, atol=1e-2)


@pytest.mark.any_jax
@FORMS
def test_both_modes(args, normal, form):
    tangents = jax.tree.map(lambda x: normal(*x.shape), args)
    assert_trees_close(jax.jvp(form, args, tangents), jax.jvp(formula, args, tangents))
    for argnum in range(5):
        actual = jax.jit(jax.grad(square_sum(form), argnum))(*args)
        assert_trees_close(actual, jax.grad(square_sum(formula), argnum)(*args))
        hessian = jax.hessian(square_sum(form), argnum)(*args)
        assert_trees_close(hessian, jax.hessian(square_sum(formula), argnum)(*args), 5e-3)


@pytest.mark.any_jax
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@FORMS
def test_16_bit_gradients(normal, exact, assert_accurate, form, dtype):
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


@pytest.mark.parametrize("preferred", [None, jnp.float32])
def test_linear_transpose_in_the_second_weight(normal, preferred):
    x, w, u = normal(2, 4, 6), normal(6, 8), normal(6, 8)
    b, g = normal(8), normal(2, 4, 8)

    def ours(u, b):
        return gated_gemm(x, w, u, bias_gate=w[0], bias_up=b, preferred_element_type=preferred)

    def formula(u, b):
        return jax.nn.silu(x @ w + w[0]) * (x @ u + b)

    for f, h, arguments in (
        (ours, formula, (u, b)),
        (lambda u: ours(u, b), lambda u: formula(u, 0 * b), (u,)),
        (lambda b: ours(u, b), lambda b: formula(0 * u, b), (b,)),
    ):
        expected = jax.linear_transpose(h, *arguments)(g)
        assert_trees_close(jax.linear_transpose(f, *arguments)(g), expected)
        assert_trees_close(jax.linear_transpose(jax.jit(f), *arguments)(g), expected)


def test_linear_transpose_of_layers_in_the_second_weight(normal):
    x, w, u, v, g = normal(4, 6), normal(6, 8), normal(6, 8), normal(8, 5), normal(4, 5)
    (actual,) = jax.linear_transpose(lambda u: gated_mlp(x, w, u, v), u)(g)
    (expected,) = jax.linear_transpose(lambda u: (jax.nn.silu(x @ w) * (x @ u)) @ v, u)(g)
    assert_trees_close(actual, expected)


# Transformations


@pytest.mark.any_jax
@pytest.mark.parametrize(
    "axes",
    [
        (0, None, None, None, None),
        (1, 2, 2, 0, None),
        (None, 0, 0, 1, 1),
        (2, 0, 1, None, 0),
        (0, 0, None, None, None),
        (None, None, 1, None, None),
        (None, None, None, 0, None),
        (None, None, None, 0, 1),
    ],
)
@FORMS
def test_vmap(normal, form, axes):
    shapes = [(4, 6), (6, 5), (6, 5), (5,), (5,)]
    args = [
        normal(*(shape if axis is None else np.insert(shape, axis, 3)))
        for shape, axis in zip(shapes, axes, strict=True)
    ]

    def of_batch(f, *args):
        return jax.vmap(f, axes)(*args), jax.grad(square_sum(jax.vmap(f, axes)), range(5))(*args)

    def per_example(f, *args):
        return jax.vmap(jax.grad(square_sum(f), range(5)), axes)(*args)

    for both in (of_batch, per_example):
        actual, expected = (jax.jit(both, static_argnums=0)(f, *args) for f in (form, formula))
        assert_trees_close(actual, expected, 1e-3)


def test_batch_of_biases_needs_one_pair_of_products(args, normal):
    biases = normal(4, 3)
    f = jax.vmap(fused, (None, None, None, 0, None))
    text = jax.jit(f).lower(*args[:3], biases, args[4]).as_text()
    assert text.count("dot_general") == 2
    assert "tensor<4x2x5x7x" not in text


def test_scan_and_remat(normal):
    x, w, v = normal(4, 5), 0.5 * normal(3, 5, 5), normal(3, 5, 5)

    def loss(f, policy=None):
        def layer(x, weights):
            return jax.checkpoint(f, policy=policy)(x, *weights), None

        return lambda x, w, v: jnp.sum(jax.lax.scan(layer, x, (w, v))[0] ** 2)

    expected = jax.value_and_grad(loss(formula), (0, 1, 2))(x, w, v)
    names = jax.checkpoint_policies.save_only_these_names(jax_tcgemm.PREACTIVATION)
    for policy in (None, names, jax.checkpoint_policies.everything_saveable):
        for form in (fused, packed):
            actual = jax.jit(jax.value_and_grad(loss(form, policy), (0, 1, 2)))(x, w, v)
            assert_trees_close(actual, expected, 1e-3)


def test_policy_decides_whether_products_are_computed_again(args, count_gemms):
    def grads(policy):
        f = jax.checkpoint(fused, policy=policy)
        return jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))), (0, 1, 2))

    policies = jax.checkpoint_policies
    saved = count_gemms(grads(policies.save_only_these_names(jax_tcgemm.PREACTIVATION)), *args[:3])
    again = count_gemms(grads(policies.nothing_saveable), *args[:3])
    assert (saved, again) == (6, 8)


def test_disabled_jit(args):
    with jax.disable_jit():
        assert_trees_close(fused(*args), formula(*args))


def test_export(args, cuda_module):
    pytest.importorskip("flatbuffers")
    exported = jax.export.export(
        jax.jit(packed),
        platforms=("cpu", "cuda"),
        disabled_checks=jax_tcgemm.export_disabled_checks(),
    )(*args)
    loaded = jax.export.deserialize(exported.serialize(vjp_order=1))
    assert_trees_close(loaded.call(*args), formula(*args))
    actual = jax.grad(square_sum(loaded.call))(*args)
    assert_trees_close(actual, jax.grad(square_sum(formula))(*args))


@pytest.mark.parametrize("check_vma", [False, True])
@FORMS
def test_shard_map(normal, form, check_vma):
    mesh = jax.make_mesh(
        (4,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:4]
    )
    rows, whole = PartitionSpec("x"), PartitionSpec()
    args = (normal(8, 6), normal(6, 5), normal(6, 5), normal(5), normal(5))
    sharded = jax.shard_map(
        form,
        mesh=mesh,
        in_specs=(rows, whole, whole, whole, whole),
        out_specs=rows,
        check_vma=check_vma,
    )
    assert_trees_close(jax.jit(sharded)(*args), formula(*args))
    actual = jax.jit(jax.grad(square_sum(sharded), range(5)))(*args)
    assert_trees_close(actual, jax.grad(square_sum(formula), range(5))(*args))


# Errors

X, W = jnp.zeros((4, 6)), jnp.zeros((6, 5))


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
