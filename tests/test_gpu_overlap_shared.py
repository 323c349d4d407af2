"""Products of the same gathered rows, and sums for all devices, on two and four GPUs."""

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
    layers,
    mesh_of,
    two_layers,
    wide,
)
from overlapped_programs import swish
from sharded_checks import compiled, put

from jax_tcgemm import gemm
from jax_tcgemm._extension import GATHERS_TARGET, OVERLAPPED_FUNCTION_TARGET
from jax_tcgemm.tools.collectives import collectives

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("small_products")]


@pytest.fixture(params=[2, 4])
def mesh(request):
    return mesh_of(request.param)


def gathers(program):
    return program.as_text().count(f'custom_call_target="{GATHERS_TARGET}"')


def kinds(program, mesh):
    return [kind for kind, size in collectives(program.as_text(), mesh.size) if size > 64]


def test_several_products_gather_once(mesh, normal):
    x = put(mesh, normal(512, 256, dtype=BF16), "x")
    weights = [put(mesh, normal(256, 1024, dtype=BF16) / 16, None, "x") for _ in range(3)]

    def ours(x, *weights):
        return [gemm(x, w) for w in weights]

    columns = NamedSharding(mesh, P(None, "x"))
    program = jax.jit(ours, out_shardings=[columns] * 3).lower(x, *weights).compile()
    assert (calls(program), gathers(program)) == (3, 1)
    assert "all-gather" not in kinds(program, mesh)
    for _ in range(3):
        a, *others = wide(x, *weights)
        for actual, w in zip(program(x, *weights), others, strict=True):
            close(actual, a @ w)


def test_gradients_gather_each_operand_once(mesh, normal):
    operands = layers(mesh, normal)
    rows = NamedSharding(mesh, P("x"))

    def loss(*args):
        y = jax.lax.with_sharding_constraint(two_layers(*args), rows)
        return jnp.sum(jnp.square(y.astype(jnp.float32)))

    out = tuple(x.sharding for x in operands)
    program = jax.jit(jax.grad(loss, (0, 1, 2)), out_shardings=out).lower(*operands).compile()
    assert (calls(program), gathers(program)) == (6, 2)
    assert "all-gather" not in kinds(program, mesh)


def test_a_gather_before_a_loop(mesh, normal):
    """XLA moves the buffer out of the loop; the first iteration fills it."""
    x = put(mesh, normal(512, 256, dtype=BF16), "x")
    w = put(mesh, normal(256, 1024, dtype=BF16) / 16, None, "x")

    def ours(x, w, count):
        def step(i, y):
            return y + gemm(x, w * (1 + i).astype(BF16))

        return jax.lax.fori_loop(0, count, step, jnp.zeros((512, 1024), BF16))

    out = NamedSharding(mesh, P(None, "x"))
    program = jax.jit(ours, out_shardings=out).lower(x, w, 3).compile()
    assert calls(program) == 1
    a, b = wide(x, w)
    for count in (3, 0, 1, 3):
        close(program(x, w, count), (a @ b) * (count * (count + 1) // 2), 4e-2)


@pytest.mark.parametrize("count", [1, 2])
def test_functions_of_gathered_rows(mesh, normal, count):
    """The first product runs in parts, the second one has all rows at once."""
    x = put(mesh, normal(512, 256, dtype=BF16), "x")
    weights = [put(mesh, normal(256, 1024, dtype=BF16) / 16, None, "x") for _ in range(count)]
    b, c = put(mesh, normal(1024), "x"), put(mesh, normal(512, 1024, dtype=BF16), None, "x")

    def ours(x, b, c, *weights):
        def function(p, b, c):
            return swish(p, b) + c

        return [gemm(x, w, epilogue=function, epilogue_operands=(b, c)) for w in weights]

    columns = NamedSharding(mesh, P(None, "x"))
    program = jax.jit(ours, out_shardings=[columns] * count).lower(x, b, c, *weights).compile()
    text = program.as_text()
    assert text.count(f'custom_call_target="{OVERLAPPED_FUNCTION_TARGET}"') == count
    assert gathers(program) == 1
    a, bias, residual, *others = wide(x, b, c, *weights)
    for _ in range(3):
        for actual, w in zip(program(x, b, c, *weights), others, strict=True):
            p = a @ w
            close(actual, p * jax.nn.sigmoid(1.5 * p + bias) + residual)


SUMS = {
    "plain": (gemm, jnp.matmul, ()),
    "residual": (
        lambda x, w, c: gemm(x, w, c, activation="relu"),
        lambda x, w, c: jax.nn.relu(x @ w + c),
        (((512, 384), ()),),
    ),
    "function": (
        lambda x, w: gemm(x, w, epilogue=lambda p: jnp.tanh(p).astype(BF16)),
        lambda x, w: jnp.tanh(x @ w),
        (),
    ),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_for_all_devices(mesh, normal, name):
    ours, theirs, others = SUMS[name]
    x = put(mesh, normal(512, 256, dtype=BF16), None, "x")
    w = put(mesh, normal(256, 384, dtype=BF16) / 16, "x")
    rest = [put(mesh, normal(*shape, dtype=BF16), *spec) for shape, spec in others]
    program = compiled(mesh, ours, x, w, *rest, out=P())
    assert calls(program) == 1
    assert "all-reduce" not in kinds(program, mesh)
    expected = theirs(*wide(x, w, *rest))
    for _ in range(3):
        result = program(x, w, *rest)
        close(result, expected)
        # All devices have the same bits.
        parts = [np.asarray(shard.data, np.float32) for shard in result.addressable_shards]
        assert all(np.array_equal(parts[0], part) for part in parts)
