"""`gemm` under JAX transformations, against the formula in `jax.numpy`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_call import assert_trees_close, formula, fused, square_sum
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

import jax_tcgemm
from jax_tcgemm import gemm, ragged_dot
from jax_tcgemm.kernels import names as kernel_names

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


@pytest.mark.parametrize("ragged", [False, True])
def test_export_with_symbolic_shapes_and_a_configuration(normal, ragged):
    """Symbolic shapes do not tell if the rows suit, so XLA computes the product."""
    rows, k = jax.export.symbolic_shape("rows, k")
    algorithm = "BF16_BF16_F32"
    kinds = kernel_names.for_algorithm(algorithm, "m" if ragged else "none")
    config = next(row.name for row in kinds if row.copies_whole_chunks and not row.gated)
    bf16 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)

    def f(a, b):
        if ragged:
            return ragged_dot(a, b[None], jnp.array([3]), config=config)
        return gemm(a, b, config=config)

    exported = jax.export.export(jax.jit(f), platforms=("cpu", "cuda"))(
        bf16((rows, k)), bf16((k, 5))
    )
    x, w = normal(3, 6, dtype=jnp.bfloat16), normal(6, 5, dtype=jnp.bfloat16)
    assert_trees_close(exported.call(x, w), x @ w)


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
