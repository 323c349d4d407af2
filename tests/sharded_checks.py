"""Helpers that shard programs over devices, compile them, and list their collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fused_call import square_sum
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_program import F32, Program

from jax_tcgemm.tools.collectives import collectives


def placed(program: Program, mesh: Mesh, rng: np.random.Generator) -> list[jax.Array]:
    """Draws the operands and shards them."""
    arrays = []
    for i, (shape, spec) in enumerate(zip(program.shapes, program.specs, strict=True)):
        if i in program.sizes:
            value = jnp.asarray(program.sizes[i], jnp.int32)
        else:
            value = jnp.asarray(rng.standard_normal(shape) / 4, program.dtype)
        arrays.append(jax.device_put(value, NamedSharding(mesh, spec)))
    return arrays


def compiled(
    mesh: Mesh, function: Callable[..., Any], *operands: jax.Array, out: P | None = None
) -> Any:
    """Compiles a function anew, since other settings may have lowered it before."""
    sharding = None if out is None else NamedSharding(mesh, out)
    return jax.jit(lambda *args: function(*args), out_shardings=sharding).lower(*operands).compile()


def compiled_results(
    function: Callable[..., Any], program: Program, mesh: Mesh, operands: Any
) -> Any:
    """Compiles a program's function."""
    return compiled(mesh, function, *operands, out=program.out)


def gradients_of(function: Callable[..., Any], program: Program) -> Callable[..., Any]:
    def loss(*args: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(function(*args).astype(jnp.promote_types(program.dtype, F32))))

    return jax.grad(loss, program.gradients)


def compiled_gradients(
    function: Callable[..., Any], program: Program, mesh: Mesh, operands: Any
) -> Any:
    """Compiles the gradients of the sum of the squares of the result."""
    out = None
    if program.grads_as_operands:
        out = tuple(NamedSharding(mesh, program.specs[i]) for i in program.gradients)
    return jax.jit(gradients_of(function, program), out_shardings=out).lower(*operands).compile()


def put(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def moved(function, *operands):
    text = jax.jit(lambda *args: function(*args)).lower(*operands).compile().as_text()
    return collectives(text, 8)


def kinds(function, *operands):
    return sorted(kind for kind, _ in moved(function, *operands))


def size(function, *operands):
    return sum(size for _, size in moved(function, *operands))


def vector_of(function):
    return jax.grad(square_sum(function), (0, 1))


def spec_of(x):
    return jax.typeof(x).sharding.spec


def is_divided(function, *operands, primitive="tcgemm_compiled") -> bool:
    """Checks if our rules partition a primitive, by default a product with its epilogue."""
    call = rf"\22primitive\22:\22{primitive}\22"
    return call in jax.jit(function).lower(*operands).as_text()


def both(function, *operands):
    """Runs a function on sharded operands, and on one device."""
    alone = [jnp.asarray(np.asarray(x)) for x in operands]
    return jax.jit(function)(*operands), jax.jit(function)(*alone)
