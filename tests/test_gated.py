"""`gated_gemm`: values, derivatives, transformations, errors, and its lowering for CUDA."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_call import assert_trees_close, square_sum
from jax.sharding import PartitionSpec
from jax.test_util import check_grads

import jax_tcgemm
from jax_tcgemm import _compat, _extension, clip, gated_gemm, kernel_table, reference
from jax_tcgemm.epilogues import resolve
from jax_tcgemm.spec import GemmSpec
from jax_tcgemm.strides import Operands

FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32)


def fused(x, w_gate, w_up, bias_gate=None, bias_up=None, activation="silu"):
    """`w_gate` and `w_up` as two weights."""
    return gated_gemm(x, w_gate, w_up, bias_gate=bias_gate, bias_up=bias_up, activation=activation)


def packed(x, w_gate, w_up, bias_gate=None, bias_up=None, activation="silu"):
    """The same of a weight that holds both."""
    both = jnp.concatenate([w_gate, w_up], -1)
    return gated_gemm(x, both, bias_gate=bias_gate, bias_up=bias_up, activation=activation)


def packed_transposed(x, w_gate, w_up, bias_gate=None, bias_up=None, activation="silu"):
    both = jnp.concatenate([w_gate.mT, w_up.mT], -2)
    return gated_gemm(
        x, both, bias_gate=bias_gate, bias_up=bias_up, activation=activation, transpose_w=True
    )


def formula(x, w_gate, w_up, bias_gate=None, bias_up=None, activation="silu"):
    gate = x @ w_gate if bias_gate is None else x @ w_gate + bias_gate[..., None, :]
    up = x @ w_up if bias_up is None else x @ w_up + bias_up[..., None, :]
    return resolve(activation).reference(gate) * up


FORMS = pytest.mark.parametrize("form", [fused, packed, packed_transposed])


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
    baseline = formula(*wide, activation=activation).astype(dtype)
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
    # They are not rounded to bfloat16 on the way.
    assert not np.array_equal(grads[1], grads[1].astype(jnp.bfloat16))


# Derivatives


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


@FORMS
def test_both_modes(args, normal, form):
    tangents = jax.tree.map(lambda x: normal(*x.shape), args)
    assert_trees_close(jax.jvp(form, args, tangents), jax.jvp(formula, args, tangents))
    for argnum in range(5):
        actual = jax.jit(jax.grad(square_sum(form), argnum))(*args)
        assert_trees_close(actual, jax.grad(square_sum(formula), argnum)(*args))
        hessian = jax.hessian(square_sum(form), argnum)(*args)
        assert_trees_close(hessian, jax.hessian(square_sum(formula), argnum)(*args), 5e-3)


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


# Transformations


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


# Lowering for CUDA


def bf16(*shape):
    return jnp.zeros(shape, jnp.bfloat16)


def picked(call, *names):
    return tuple(call[name] for name in names)


MOVES = ("stablehlo.transpose", "stablehlo.convert", "stablehlo.broadcast", "stablehlo.slice")


def assert_nothing_moves(text):
    assert not [op for op in MOVES if op in text], text


@pytest.mark.parametrize("transpose_w", [False, True])
def test_one_custom_call(cuda_module, transpose_w):
    w = bf16(24, 16) if transpose_w else bf16(16, 24)

    def f(x, w, v, bias, bias2):
        return gated_gemm(x, w, v, bias_gate=bias, bias_up=bias2, transpose_w=transpose_w)

    text, (call,) = cuda_module(f, bf16(2, 40, 16), w, w, bf16(24), jnp.zeros(24))
    assert_nothing_moves(text)
    assert picked(call, "m", "n", "k", "batch_shape", "gated") == (80, 24, 16, [], True)
    assert picked(call, "has_b2", "b2_offset", "has_bias", "has_bias2") == (True, 0, True, True)
    assert picked(call, "has_aux", "activation", "bias2_strides") == (False, "Silu", [1])
    assert call["b_strides"] == ([1, 16] if transpose_w else [24, 1])
    shape = "24x16xbf16" if transpose_w else "16x24xbf16"
    assert call["operands"] == ["2x40x16xbf16", shape, "24xbf16", shape, "24xf32"]
    assert call["results"] == ["2x40x24xbf16"]
    assert not call["has_workspace"]


@pytest.mark.parametrize(
    ("transpose_w", "strides", "offset"), [(False, [48, 1], 24), (True, [1, 16], 24 * 16)]
)
def test_packed_weight_is_read_in_place(cuda_module, transpose_w, strides, offset):
    w = bf16(48, 16) if transpose_w else bf16(16, 48)
    f = functools.partial(gated_gemm, transpose_w=transpose_w, activation=None)
    text, (call,) = cuda_module(f, bf16(80, 16), w)
    assert_nothing_moves(text)
    assert picked(call, "n", "b_strides", "b2_offset", "has_b2") == (24, strides, offset, False)
    assert picked(call, "activation", "results") == ("", ["80x24xbf16"])


def test_derivative_takes_three_results_of_one_pass(cuda_module):
    x, w = bf16(80, 16), bf16(16, 24)

    def pullback(x, w, v, g):
        y, vjp = jax.vjp(fused, x, w, v)
        return y, vjp(g)

    text, calls = cuda_module(pullback, x, w, w, bf16(80, 24))
    forward, *rest = calls
    assert picked(forward, "gated", "has_aux") == (True, True)
    assert forward["results"] == ["80x24xbf16"] * 3
    assert len(rest) == 4
    # The two parts of x's cotangent are added by the second product.
    first, second = (call for call in rest if call["results"] == ["80x16xbf16"])
    assert picked(first, "has_c", "c_role") == (False, "add")
    assert picked(second, "has_c", "c_role", "beta", "c_strides") == (True, "add", 1.0, [16, 1])
    assert text.count("operand_index = 2") == 1  # in place
    assert "stablehlo.transpose" not in text


@pytest.mark.parametrize("transpose_w", [False, True])
def test_gradients_of_a_packed_weight_are_two_products(cuda_module, transpose_w):
    w = bf16(48, 16) if transpose_w else bf16(16, 48)

    def pullback(x, w, g):
        f = functools.partial(gated_gemm, transpose_w=transpose_w)
        return jax.vjp(f, x, w)[1](g)

    text, calls = cuda_module(pullback, bf16(8, 16), w, bf16(8, 24))
    shape = "48x16xbf16" if transpose_w else "16x48xbf16"
    assert sorted(call["results"][0] for call in calls[1:]) == sorted(["8x16xbf16", shape])
    # XLA finds that both products read the same concatenated cotangent.
    compiled = jax.jit(pullback).lower(bf16(8, 16), w, bf16(8, 24)).compile().as_text()
    assert len(re.findall(r" concatenate\(", compiled)) == 1
    assert "stablehlo.transpose" not in text
    # The forward pass is for the pre-activations alone: one product with the packed weight.
    assert picked(calls[0], "gated", "n", "results") == (False, 48, ["8x48xbf16"])


@pytest.mark.parametrize("saves", [False, True])
def test_few_rows_are_two_products(cuda_module, saves):
    """The second takes the first, which is rounded, as a factor."""
    x, w = bf16(64, 16), bf16(16, 24)

    def f(x, w, v, bias):
        function = functools.partial(gated_gemm, bias_gate=bias, bias_up=bias)
        return jax.vjp(function, x, w, v) if saves else function(x, w, v)

    text, (up, gate) = cuda_module(lambda *args: jax.tree.leaves(f(*args)), x, w, w, bf16(24))
    assert_nothing_moves(text)
    assert picked(up, "c_role", "activation", "has_bias", "gated") == ("add", "", True, False)
    assert picked(gate, "c_role", "activation", "has_c") == ("factor", "Silu", True)
    assert gate["has_aux"] == saves


def test_vmap_is_strides(cuda_module):
    x, w = bf16(80, 3, 16), bf16(16, 3, 24)
    f = jax.vmap(fused, in_axes=(1, 1, 1))
    text, (call,) = cuda_module(f, x, w, w)
    assert_nothing_moves(text)
    assert picked(call, "batch_shape", "a_strides", "b_strides") == (
        *([3], [16, 48, 1], [24, 72, 1]),
    )


@pytest.mark.parametrize(
    ("why", "x", "w", "v", "axes"),
    [
        ("nothing to multiply", bf16(8, 0), bf16(0, 24), bf16(0, 24), None),
        ("float32", X, W, W, None),
        ("off 16 bytes", bf16(8, 16), bf16(16, 23), bf16(16, 23), None),
        ("k off 16 bytes", bf16(8, 9), bf16(9, 24), bf16(9, 24), None),
        ("two layouts", bf16(8, 16), bf16(16, 3, 24), bf16(3, 16, 24), (None, 1, 0)),
        ("no contiguous axis", bf16(8, 16, 3), bf16(16, 24), bf16(16, 24), (2, None, None)),
    ],
)
def test_reference_where_there_is_no_gated_kernel(cuda_module, why, x, w, v, axes):
    f = fused if axes is None else jax.vmap(fused, axes)
    text, calls = cuda_module(f, x, w, v)
    assert not calls, why
    assert text.count("dot_general") == 2


def test_packed_halves_off_16_bytes_take_the_reference(cuda_module):
    text, calls = cuda_module(gated_gemm, bf16(8, 16), bf16(16, 24))
    assert not calls
    assert text.count("dot_general") == 1


def test_config_is_the_primal_calls(cuda_module):
    rows = kernel_table.for_algorithm("BF16_BF16_F32")
    name = next(row.name for row in rows if row.gated)

    def loss(x, w):
        return gated_gemm(x, w, w, config=name).sum().astype(jnp.float32)

    _, calls = cuda_module(jax.value_and_grad(loss, (0, 1)), bf16(16, 16), bf16(16, 16))
    assert [call["config"] for call in calls] == [name, *[""] * 4]
    with pytest.raises(ValueError, match="not a kernel configuration"):
        jax_tcgemm.gemm(bf16(16, 16), bf16(16, 16), config=name)
    plain = next(row.name for row in rows if not row.gated)
    with pytest.raises(ValueError, match=r"for gated products in BF16_BF16_F32") as raised:
        gated_gemm(bf16(16, 16), bf16(16, 16), config=plain)
    assert name in str(raised.value)


def test_builds_without_gated_kernels_take_the_reference(cuda_module, monkeypatch):
    plain = frozenset(row.name for row in kernel_table.CONFIGS if not row.gated)
    monkeypatch.setattr(_extension, "KERNEL_NAMES", plain)
    _, calls = cuda_module(fused, bf16(16, 16), bf16(16, 16), bf16(16, 16))
    assert not calls


def test_a_factor(normal, exact):
    a, b, c = normal(5, 7), normal(7, 3), normal(5, 3)
    whole = (0, 1)
    spec = GemmSpec(
        Operands(whole, whole, whole),
        jnp.dtype(jnp.float32),
        _compat.canonicalize_precision("highest"),
        activation="silu",
        c_role="factor",
    )
    (got,) = reference.reference_gemm(a, b, c, spec=spec)
    z = exact(a) @ exact(b)
    np.testing.assert_allclose(got, z / (1 + np.exp(-z)) * exact(c), rtol=1e-5, atol=1e-5)
