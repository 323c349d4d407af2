"""`gemm` in ways that `test_transformations.py` does not try: axes, donation, symbolic shapes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_call import assert_trees_close, formula, fused, square_sum
from jax.sharding import PartitionSpec
from sharded_program import mesh_of

from jax_tcgemm import gemm, ragged_dot
from jax_tcgemm.kernels import names as kernel_names


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


def test_donated_addend(normal):
    a, b, c = normal(64, 64), normal(64, 64), normal(64, 64)
    expected = a @ b + c
    donated = c.copy()
    got = jax.jit(gemm, donate_argnums=2)(a, b, donated)
    assert_trees_close(got, expected)
    assert donated.is_deleted()


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


@pytest.mark.parametrize("check_vma", [False, True])
def test_shard_map_over_the_contracted_dimension(normal, check_vma):
    a, b = normal(6, 8), normal(8, 5)

    def partial_sum(a, b):
        return jax.lax.psum(gemm(a, b), "x")

    f = jax.shard_map(
        partial_sum,
        mesh=mesh_of((4,)),
        in_specs=(PartitionSpec(None, "x"), PartitionSpec("x")),
        out_specs=PartitionSpec(),
        check_vma=check_vma,
    )
    assert_trees_close(jax.jit(f)(a, b), a @ b)
    expected = jax.grad(square_sum(jnp.matmul), (0, 1))(a, b)
    assert_trees_close(jax.grad(square_sum(f), (0, 1))(a, b), expected)
