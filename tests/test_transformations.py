"""`gemm` under every JAX transformation, against the same of the formula in `jax.numpy`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jax.test_util import check_grads

import jax_tcgemm
from jax_tcgemm import gemm
from jax_tcgemm.epilogues import ACTIVATIONS

NAMES = ("a", "b", "c", "bias", "alpha", "beta")


def fused(a, b, c, bias, alpha, beta, activation="gelu"):
    return gemm(a, b, c, bias=bias, alpha=alpha, beta=beta, activation=activation)


def formula(a, b, c, bias, alpha, beta, activation="gelu"):
    z = alpha * jnp.matmul(a, b) + beta * c + bias[..., None, :]
    return z if activation is None else ACTIVATIONS[activation].reference(z)


@pytest.fixture
def operands(normal):
    return normal(2, 5, 7), normal(7, 3), normal(5, 1), normal(3), normal(), normal()


def assert_trees_close(actual, expected, tolerance=2e-4):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(
            np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=tolerance, atol=tolerance
        ),
        actual,
        expected,
    )


def square_sum(function):
    return lambda *args: jnp.sum(jnp.square(function(*args).astype(jnp.float32)))


# Derivatives


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_derivatives_against_finite_differences(rng, activation):
    with jax.enable_x64(True):
        shapes = [(2, 3, 4), (4, 3), (3, 1), (3,), (), ()]
        args = [jnp.asarray(rng.uniform(0.2, 1, shape)) for shape in shapes]
        check_grads(functools.partial(fused, activation=activation), args, order=2)


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize(
    ("a_batch", "b_batch", "bias_batch"),
    [
        ((), (), ()),
        ((3,), (), ()),
        ((), (3,), (3,)),
        ((2, 3), (3,), (2, 1)),
        ((2, 3), (2, 1), (3,)),
        ((2, 1), (1, 3), (2, 3)),
        ((2, 3), (), (2, 1)),
    ],
)
def test_grad_of_every_operand(normal, transpose_a, transpose_b, a_batch, b_batch, bias_batch):
    a, b = normal(*a_batch, 4, 6), normal(*b_batch, 6, 5)
    args = (a, b, normal(1, 5), normal(*bias_batch, 5), jnp.float32(0.7), jnp.float32(-0.4))

    def stored(a, b, c, bias, alpha, beta):
        return gemm(
            a.mT if transpose_a else a,
            b.mT if transpose_b else b,
            c,
            bias=bias,
            alpha=alpha,
            beta=beta,
            activation="silu",
            transpose_a=transpose_a,
            transpose_b=transpose_b,
        )

    expected = jax.grad(square_sum(functools.partial(formula, activation="silu")), range(6))(*args)
    actual = jax.grad(square_sum(stored), range(6))(*args)
    assert_trees_close(actual, expected)


@pytest.mark.parametrize("name", NAMES)
def test_forward_mode_one_operand_at_a_time(operands, name):
    i = NAMES.index(name)

    def along(function):
        def of_one(x):
            return function(*operands[:i], x, *operands[i + 1 :])

        return jax.jvp(of_one, (operands[i],), (jnp.ones_like(operands[i]),))

    assert_trees_close(along(fused), along(formula))


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_jvp_linearize_and_vjp_agree(operands, normal, activation):
    f = functools.partial(fused, activation=activation)
    tangents = jax.tree.map(lambda x: normal(*x.shape), operands)
    expected = jax.jvp(functools.partial(formula, activation=activation), operands, tangents)
    assert_trees_close(jax.jvp(f, operands, tangents), expected)
    primal, linear = jax.linearize(f, *operands)
    assert_trees_close((primal, linear(*tangents)), expected)
    primal, pullback = jax.vjp(f, *operands)
    g = normal(*primal.shape)
    inner = sum(jnp.vdot(x, y) for x, y in zip(pullback(g), tangents, strict=True))
    np.testing.assert_allclose(inner, jnp.vdot(g, expected[1]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("argnum", range(6))
def test_hessian(operands, argnum):
    def scalar(function):
        return jax.hessian(square_sum(function), argnums=argnum)(*operands)

    assert_trees_close(scalar(fused), scalar(formula), 5e-3)


def test_constant_scalars(operands, normal):
    tangents = jax.tree.map(lambda x: normal(*x.shape), operands[:4])

    def both_modes(function):
        def f(a, b, c, bias):
            return function(a, b, c, bias, -1.5, 0.5, activation=None)

        return jax.jvp(f, operands[:4], tangents), jax.grad(square_sum(f), range(4))(*operands[:4])

    assert_trees_close(both_modes(fused), both_modes(formula))


def test_linear_transpose(normal):
    a, b, g = normal(4, 6), normal(6, 5), normal(4, 5)
    (cotangent,) = jax.linear_transpose(lambda a: gemm(a, b), a)(g)
    np.testing.assert_allclose(cotangent, g @ b.T, rtol=1e-5, atol=1e-5)
    # alpha and beta, a and c: several operands are linear at once.
    c = normal(4, 5)
    f = jax.linear_transpose(lambda s, t: gemm(a, b, c, alpha=s, beta=t), 1.0, 1.0)
    expected = (jnp.sum(g * (a @ b)), jnp.sum(g * c))
    assert_trees_close(f(g), expected)
    f = jax.linear_transpose(lambda a, c: gemm(a, b, c, alpha=2.0, beta=3.0), a, c)
    assert_trees_close(f(g), (2 * g @ b.T, 3 * g))


@pytest.mark.parametrize("preferred", [None, jnp.float32])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bit_gradients(normal, exact, assert_accurate, dtype, preferred):
    a, b, bias = normal(2, 16, 24, dtype=dtype), normal(24, 8, dtype=dtype), normal(8, dtype=dtype)
    g = normal(2, 16, 8, dtype=preferred or dtype)

    def f(a, b, bias):
        return gemm(a, b, bias=bias, preferred_element_type=preferred)

    def by_matmul(a, b, bias):
        z = jnp.matmul(a, b, preferred_element_type=jnp.float32) + bias.astype(jnp.float32)
        return z.astype(preferred or dtype)

    actual = jax.vjp(f, a, b, bias)[1](g)
    baseline = jax.vjp(by_matmul, a, b, bias)[1](g)
    exact_grads = (
        exact(g) @ exact(b).T,
        np.einsum("imk,imn->kn", exact(a), exact(g)),
        exact(g).sum((0, 1)),
    )
    for x, operand, y, z in zip(actual, (a, b, bias), baseline, exact_grads, strict=True):
        assert x.dtype == operand.dtype
        assert_accurate(x, y, z)


def test_preset_gradients_are_not_rounded_to_the_algorithm_type(normal, exact):
    a, b = normal(16, 24), normal(24, 8)
    grad = jax.grad(lambda a: gemm(a, b, precision="BF16_BF16_F32").sum())(a)
    expected = np.broadcast_to(exact(b.astype(jnp.bfloat16)).sum(1), (16, 24))
    assert grad.dtype == jnp.float32
    np.testing.assert_allclose(grad, expected, rtol=1e-6, atol=1e-6)


def test_integer_operand_has_no_gradient(normal):
    a, b, bias = normal(3, 4, dtype=jnp.int8), normal(4, 5), normal(5)
    expected = jax.grad(lambda b: jnp.sum(jnp.sin(a.astype(jnp.float32) @ b + bias)))(b)
    actual = jax.grad(lambda b: jnp.sum(jnp.sin(gemm(a, b, bias=bias))))(b)
    assert_trees_close(actual, expected)


# What is not computed


def test_zero_tangents_cost_nothing(operands, count_gemms):
    a, b, c, bias, _, _ = operands

    def f(c, bias):
        return fused(a, b, c, bias, 1.5, 0.5)

    tangents = (jnp.ones_like(c), jnp.ones_like(bias))
    assert count_gemms(lambda *primals: jax.jvp(f, primals, tangents), c, bias) == 1
    assert count_gemms(jax.grad(square_sum(lambda bias: f(c, bias))), bias) == 1


def test_gradients_of_unused_operands_are_not_computed(operands, count_gemms):
    loss = square_sum(fused)
    assert count_gemms(loss, *operands) == 1
    assert count_gemms(jax.grad(loss, argnums=1), *operands) == 2
    assert count_gemms(jax.grad(loss, argnums=(0, 1)), *operands) == 3

    def unused(*args):
        _, grad_b = jax.grad(loss, argnums=(0, 1))(*args)
        return grad_b

    assert count_gemms(unused, *operands) == 2


def test_linear_gradient_runs_no_forward_product(normal, count_gemms):
    a, b = normal(4, 6), normal(6, 5)
    assert count_gemms(jax.grad(lambda a, b: gemm(a, b).sum()), a, b) == 1


def test_unread_preactivation_is_dropped(normal, cuda_module):
    a, b = normal(8, 8), normal(8, 8)

    def only_primal(a, b):
        return jax.vjp(lambda a: gemm(a, b, activation="gelu"), a)[0]

    _, (call,) = cuda_module(only_primal, a, b)
    assert (call["has_aux"], call["activation"]) == (False, "Gelu")

    def only_tangent(a, b):
        return jax.grad(lambda a: gemm(a, b, activation="gelu").sum())(a)

    _, (forward, _) = cuda_module(only_tangent, a, b)
    assert (forward["has_aux"], forward["activation"]) == (False, "")


def test_reverse_pass_keeps_one_residual_of_the_result_type(normal):
    a, b = normal(16, 24, dtype=jnp.bfloat16), normal(24, 8, dtype=jnp.bfloat16)
    _, pullback = jax.vjp(lambda a, b: gemm(a, b, activation="gelu"), a, b)
    saved = [x for x in jax.tree.leaves(pullback) if x.shape == (16, 8)]
    assert [x.dtype for x in saved] == [jnp.bfloat16]


# Batching


@pytest.mark.parametrize("b_axis", [None, 0, 1, 2])
@pytest.mark.parametrize("a_axis", [None, 0, 1, 2])
@pytest.mark.parametrize("transpose", [False, True])
def test_vmap_axes(normal, a_axis, b_axis, transpose):
    a, b, c, bias = normal(4, 6), normal(6, 5), normal(4, 5), normal(5)

    def mapped(x, axis):
        return x if axis is None else normal(*np.insert(x.shape, axis, 3))

    a, b = mapped(a.T if transpose else a, a_axis), mapped(b.T if transpose else b, b_axis)
    for c_axis, bias_axis in ((None, 1), (2, None), (0, 0)):
        args = (a, b, mapped(c, c_axis), mapped(bias, bias_axis))
        axes = (a_axis, b_axis, c_axis, bias_axis)

        def f(a, b, c, bias):
            return gemm(a, b, c, bias=bias, transpose_a=transpose, transpose_b=transpose)

        def g(a, b, c, bias):
            return (a.T if transpose else a) @ (b.T if transpose else b) + c + bias

        for out_axes in (0, 2):
            assert_trees_close(
                jax.vmap(f, axes, out_axes)(*args), jax.vmap(g, axes, out_axes)(*args)
            )


def test_vmap_of_scalars_nested(normal):
    a, b, c = normal(3, 4, 6), normal(6, 2, 5), normal(4, 5)
    alpha, beta = normal(3), normal(2, 3)

    def nested(function):
        inner = jax.vmap(function, in_axes=(0, None, None, None, 0, 0))
        outer = jax.vmap(inner, in_axes=(None, 1, None, None, None, 0))
        return jax.jit(outer)(a, b, c, jnp.zeros(5), alpha, beta)

    assert_trees_close(nested(fused), nested(formula))


@pytest.mark.parametrize("activation", [None, "tanh"])
def test_vmap_of_grad_and_grad_of_vmap(normal, activation):
    a, b, bias = normal(3, 4, 6), normal(3, 6, 5), normal(5)
    rest = (bias, jnp.float32(0.5), jnp.float32(2.0))

    def per_example(function):
        grad = jax.grad(square_sum(functools.partial(function, activation=activation)), (0, 1, 3))
        return jax.vmap(grad, in_axes=(0, 0, None, None, None, None))(a, b, jnp.ones(5), *rest)

    def of_batch(function):
        batched = jax.vmap(
            functools.partial(function, activation=activation), (0, 0, None, None, None, None)
        )
        return jax.grad(square_sum(batched), (0, 1, 2, 3, 4, 5))(a, b, jnp.ones(5), *rest)

    assert_trees_close(per_example(fused), per_example(formula))
    assert_trees_close(of_batch(fused), of_batch(formula))


def test_batch_of_epilogue_operands_needs_one_product(operands, count_gemms):
    a, b, c, bias, alpha, beta = operands
    biases = jnp.stack([bias, 2 * bias, -bias])
    axes = (None, None, None, 0, None, None)
    args = (a, b, c, biases, alpha, beta)
    batched = jax.vmap(fused, axes)
    assert_trees_close(batched(*args), jax.vmap(formula, axes)(*args))
    text = jax.jit(batched).lower(*args).as_text()
    assert text.count("dot_general") == 1
    assert "tensor<3x2x5x7x" not in text
    assert_trees_close(
        jax.jacrev(fused, argnums=3)(*operands), jax.jacrev(formula, argnums=3)(*operands)
    )


def test_spmd_axis_name(normal):
    mesh = jax.make_mesh(
        (2,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:2]
    )
    a, b = normal(4, 3, 6), normal(6, 5)
    with jax.set_mesh(mesh):
        f = jax.jit(jax.vmap(lambda a: gemm(a, b), spmd_axis_name="x"))
        assert_trees_close(f(a), a @ b)


# Control flow and the rest


def test_scan_while_and_map(normal):
    w, x = 0.3 * normal(3, 5, 5), normal(4, 5)

    def by(product):
        def layer(x, w):
            return product(x, w), None

        def power(x):
            return jax.lax.while_loop(
                lambda state: state[0] < 3, lambda s: (s[0] + 1, product(s[1], w[0])), (0, x)
            )[1]

        def loss(w, x):
            return jnp.sum(jax.lax.scan(layer, x, w)[0] ** 2)

        rows = jax.lax.map(lambda row: product(row[None], w[1]), x, batch_size=2)
        return jax.value_and_grad(loss, (0, 1))(w, x), power(x), rows

    actual = by(lambda x, w: gemm(x, w, activation="tanh"))
    assert_trees_close(actual, by(lambda x, w: jnp.tanh(x @ w)))


@pytest.mark.parametrize(
    "policy",
    [
        None,
        jax.checkpoint_policies.everything_saveable,
        jax.checkpoint_policies.dots_saveable,
        jax.checkpoint_policies.save_only_these_names("hidden"),
    ],
)
def test_remat(operands, policy):
    def twice(function):
        def f(a, b, *rest):
            hidden = checkpoint_name(function(a, b, *rest), "hidden")
            return function(hidden, b.T, 0.0, jnp.ones(7), *rest[2:])

        return f

    loss = jax.checkpoint(square_sum(twice(fused)), policy=policy)
    expected = jax.grad(square_sum(twice(formula)), range(6))(*operands)
    assert_trees_close(jax.grad(loss, range(6))(*operands), expected, 2e-3)
    assert_trees_close(jax.jit(jax.grad(loss, range(6)))(*operands), expected, 2e-3)


def test_donated_addend(normal):
    a, b, c = normal(64, 64), normal(64, 64), normal(64, 64)
    expected = a @ b + c
    donated = c.copy()
    got = jax.jit(gemm, donate_argnums=2)(a, b, donated)
    assert_trees_close(got, expected)
    assert donated.is_deleted()


def test_disabled_jit(operands):
    with jax.disable_jit():
        assert_trees_close(fused(*operands), formula(*operands))


def test_export_round_trip(operands, cuda_module):
    pytest.importorskip("flatbuffers")
    exported = jax.export.export(
        jax.jit(fused),
        platforms=("cpu", "cuda"),
        disabled_checks=jax_tcgemm.export_disabled_checks(),
    )(*operands)
    assert "jax_tcgemm_gemm_v1" in exported.mlir_module()
    blob = exported.serialize(vjp_order=1)
    loaded = jax.export.deserialize(blob)
    assert_trees_close(loaded.call(*operands), formula(*operands))
    assert_trees_close(
        jax.grad(square_sum(loaded.call))(*operands), jax.grad(square_sum(formula))(*operands)
    )


def test_export_with_symbolic_shapes(normal):
    (rows,) = jax.export.symbolic_shape("rows")
    a = jax.ShapeDtypeStruct((rows, 6), jnp.float32)
    b = normal(6, 5)
    exported = jax.export.export(jax.jit(gemm), platforms=("cpu", "cuda"))(a, b)
    x = normal(9, 6)
    assert_trees_close(exported.call(x, b), x @ b)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("check_vma", [False, True])
def test_shard_map(normal, check_vma, jit):
    mesh = jax.make_mesh(
        (4,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:4]
    )
    rows, whole = PartitionSpec("x"), PartitionSpec()
    args = (normal(8, 6), normal(6, 5), normal(5), normal(5), jnp.float32(0.5), jnp.float32(2))

    def sharded(*args):
        return jax.shard_map(
            fused,
            mesh=mesh,
            in_specs=(rows, whole, whole, whole, whole, whole),
            out_specs=rows,
            check_vma=check_vma,
        )(*args)

    transform = jax.jit if jit else lambda f: f
    assert_trees_close(transform(sharded)(*args), formula(*args))
    actual = transform(jax.grad(square_sum(sharded), range(6)))(*args)
    assert_trees_close(actual, jax.grad(square_sum(formula), range(6))(*args))


@pytest.mark.parametrize("check_vma", [False, True])
def test_shard_map_over_the_contracted_dimension(normal, check_vma):
    mesh = jax.make_mesh(
        (4,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:4]
    )
    a, b = normal(6, 8), normal(8, 5)

    def partial_sum(a, b):
        return jax.lax.psum(gemm(a, b), "x")

    f = jax.shard_map(
        partial_sum,
        mesh=mesh,
        in_specs=(PartitionSpec(None, "x"), PartitionSpec("x")),
        out_specs=PartitionSpec(),
        check_vma=check_vma,
    )
    assert_trees_close(jax.jit(f)(a, b), a @ b)
    expected = jax.grad(square_sum(jnp.matmul), (0, 1))(a, b)
    assert_trees_close(jax.grad(square_sum(f), (0, 1))(a, b), expected)
