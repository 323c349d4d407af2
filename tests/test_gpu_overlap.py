"""Products whose rows travel beside them, on two and four GPUs of one process: results."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from overlapped_products import (
    BF16,
    calls,
    close,
    formula,
    layers,
    mesh_of,
    two_layers,
    wide,
)
from sharded_checks import compiled, put

from jax_tcgemm import dot_general, gated_gemm, gemm
from jax_tcgemm.tools.collectives import collectives

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("small_products")]


@pytest.fixture(params=[2, 4])
def mesh(request):
    return mesh_of(request.param)


GATHERED = {
    "plain": (gemm, jnp.matmul, ()),
    "dot_general": (
        lambda x, w: dot_general(x, w, (((1,), (0,)), ((), ()))),
        jnp.matmul,
        (),
    ),
    "bias": (
        lambda x, w, b: gemm(x, w, bias=b, activation="gelu"),
        lambda x, w, b: jax.nn.gelu(x @ w + b),
        (((1024,), ("x",)),),
    ),
    "residual": (
        lambda x, w, c: gemm(x, w, c, alpha=0.5, activation="relu"),
        lambda x, w, c: jax.nn.relu(0.5 * (x @ w) + c),
        (((512, 1024), (None, "x")),),
    ),
    "row_scale": (
        lambda x, w, s: gemm(x, w, row_scale=s),
        lambda x, w, s: s[:, None] * (x @ w),
        (((512,), ()),),
    ),
    "gated": (
        gated_gemm,
        lambda x, w, v: jax.nn.silu(x @ w) * (x @ v),
        (((256, 1024), (None, "x")),),
    ),
}


@pytest.mark.parametrize("name", GATHERED)
def test_rows_are_gathered_beside_the_product(mesh, normal, name):
    ours, theirs, others = GATHERED[name]
    x = put(mesh, normal(512, 256, dtype=BF16), "x")
    w = put(mesh, normal(256, 1024, dtype=BF16) / 16, None, "x")
    rest = [put(mesh, normal(*shape, dtype=BF16), *spec) for shape, spec in others]
    program = compiled(mesh, ours, x, w, *rest, out=P(None, "x"))
    assert calls(program) == 1
    kinds = [kind for kind, size in collectives(program.as_text(), mesh.size) if size > 64]
    assert "all-gather" not in kinds
    for _ in range(3):
        close(program(x, w, *rest), theirs(*wide(x, w, *rest)))


def test_rows_of_a_transposed_operand(mesh, normal):
    x = put(mesh, normal(256, 512, dtype=BF16), None, "x")
    w = put(mesh, normal(1024, 256, dtype=BF16) / 16, "x")
    program = compiled(
        mesh, lambda x, w: gemm(x, w, transpose_a=True, transpose_b=True), x, w, out=P(None, "x")
    )
    assert calls(program) == 1
    a, b = wide(x, w)
    close(program(x, w), a.T @ b.T)


def test_the_outermost_dimension_of_a_batch(mesh, normal):
    x = put(mesh, normal(4, 128, 256, dtype=BF16), "x")
    w = put(mesh, normal(256, 1024, dtype=BF16) / 16, None, "x")
    program = compiled(mesh, gemm, x, w, out=P(None, None, "x"))
    assert calls(program) == 1
    close(program(x, w), jnp.matmul(*wide(x, w)))


def test_a_sequence_behind_a_batch(mesh, normal):
    """The rows of a device do not follow each other in the result, nor in a sum's operand."""
    x = put(mesh, normal(4, 1024, 256, dtype=BF16), None, "x")
    w = put(mesh, normal(256, 2048, dtype=BF16) / 16, None, "x")
    v = put(mesh, normal(2048, 256, dtype=BF16) / 32, "x")
    c = put(mesh, normal(4, 1024, 2048, dtype=BF16), None, None, "x")

    def ours(x, w, c, v):
        return gemm(gemm(x, w, c, activation="relu"), v)

    program = compiled(mesh, ours, x, w, c, v, out=P(None, "x"))
    assert calls(program) == 2
    a, b, d, e = wide(x, w, c, v)
    close(program(x, w, c, v), jax.nn.relu(a @ b + d) @ e)


SCATTERED = {
    "plain": (gemm, jnp.matmul, ()),
    "bias": (
        lambda x, w, b: gemm(x, w, bias=b, activation="gelu"),
        lambda x, w, b: jax.nn.gelu(x @ w + b),
        (((384,), ()),),
    ),
    "residual": (
        lambda x, w, c: gemm(x, w, c, beta=2.0),
        lambda x, w, c: x @ w + 2 * c,
        (((512, 384), ("x",)),),
    ),
}


@pytest.mark.parametrize("dtype", [BF16, jnp.float16])
@pytest.mark.parametrize("name", SCATTERED)
def test_rows_are_scattered_beside_the_product(mesh, normal, name, dtype):
    ours, theirs, others = SCATTERED[name]
    x = put(mesh, normal(512, 256, dtype=dtype), None, "x")
    w = put(mesh, normal(256, 384, dtype=dtype) / 16, "x")
    rest = [put(mesh, normal(*shape, dtype=dtype), *spec) for shape, spec in others]
    program = compiled(mesh, ours, x, w, *rest, out=P("x"))
    assert calls(program) == 1
    results = [np.asarray(program(x, w, *rest), np.float32) for _ in range(3)]
    close(results[0], theirs(*wide(x, w, *rest)))
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])


@pytest.mark.parametrize("dtype", [BF16, jnp.float32])
@pytest.mark.parametrize("gathered", ["a", "b"])
def test_an_operand_is_gathered_along_k(mesh, normal, gathered, dtype):
    """The gradient of a weight, if the rows of the activations are divided."""
    own, other = (normal(512, 128, dtype=BF16), "x"), (normal(512, 2048, dtype=BF16), None, "x")
    x, w = (put(mesh, *each) for each in ((own, other) if gathered == "a" else (other, own)))

    def ours(x, w):
        return gemm(x, w, transpose_a=True, preferred_element_type=dtype)

    out = P(None, "x") if gathered == "a" else P("x")
    program = compiled(mesh, ours, x, w, out=out)
    assert calls(program) == 1
    for _ in range(3):
        a, b = wide(x, w)
        close(program(x, w), a.T @ b, 1e-2 if dtype == BF16 else 1e-4)


def test_gradients(mesh, normal):
    operands = layers(mesh, normal)
    rows = NamedSharding(mesh, P("x"))

    def gradients(function, constrain):
        def loss(*args):
            y = function(*args)
            y = jax.lax.with_sharding_constraint(y, rows) if constrain else y
            return jnp.sum(jnp.square(y.astype(jnp.float32)))

        return jax.grad(loss, (0, 1, 2))

    ours = jax.jit(
        gradients(two_layers, True), out_shardings=tuple(x.sharding for x in operands)
    ).lower(*operands)
    program = ours.compile()
    assert calls(program) == 6
    results = gradients(formula, False)(*wide(*operands))
    for actual, expected in zip(program(*operands), results, strict=True):
        close(actual, expected, 3e-2)


def test_a_loop_meets_again_in_each_iteration(mesh, normal):
    operands = layers(mesh, normal)

    def ours(x, w, v):
        def step(x, _):
            y = jax.lax.with_sharding_constraint(two_layers(x, w, v), operands[0].sharding)
            return y / 2 + x, None

        return jax.lax.scan(step, x, None, length=5)[0]

    def theirs(x, w, v):
        return jax.lax.scan(lambda x, _: (formula(x, w, v) / 2 + x, None), x, None, length=5)[0]

    program = compiled(mesh, ours, *operands, out=P("x"))
    assert calls(program) == 2
    close(program(*operands), theirs(*wide(*operands)), 3e-2)
