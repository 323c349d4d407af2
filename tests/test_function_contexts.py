"""JAX's context managers inside a function hold wherever the function is computed."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compute_on import compute_on
from jax.experimental.xla_metadata import set_xla_metadata
from paired_calls import export_options
from sharded_checks import is_divided, put
from sharded_program import mesh_of

from jax_tcgemm import gemm
from jax_tcgemm.epilogue import function as functions
from jax_tcgemm.epilogue import portable, translation

KEY = jax.random.key(7)
SHAPE = (64, 48)


def dropout(partitionable):
    """Returns an epilogue that sets its own mode of drawing."""

    def epilogue(z):
        with jax.threefry_partitionable(partitionable):
            kept = jax.random.bernoulli(KEY, 0.5, z.shape)
        return jnp.where(kept, z, 0)

    return epilogue


def kept_by(partitionable, shape=SHAPE):
    with jax.threefry_partitionable(partitionable):
        return np.asarray(jax.random.bernoulli(KEY, 0.5, shape))


def traced(epilogue):
    product = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
    return functions.trace(lambda z: [epilogue(z)], [product], 1)[0]


def exported(program):
    options = export_options()
    return lambda *args: jax.export.export(jax.jit(program), **options)(*args).call(*args)


CONFIGURATIONS = [(inner, outer) for inner in (True, False) for outer in (True, False)]


@pytest.mark.parametrize(("inner", "outer"), CONFIGURATIONS)
def test_random_numbers_count_as_the_function_says(inner, outer):
    """The caller's configuration has no effect."""
    x, w = jnp.ones((64, 8)), jnp.ones((8, 48))

    def program(x, w):
        return gemm(x, w, epilogue=dropout(inner))

    def slope(x, w):
        operands = (jnp.ones(SHAPE),)
        f = dropout(inner)
        call = lambda c: gemm(x, w, epilogue=lambda z, c: f(z * c), epilogue_operands=(c,)).sum()  # noqa: E731
        return jax.grad(call)(*operands)

    def batched(x, w):
        return jax.vmap(program, (0, None))(x[None], w)[0]

    with jax.threefry_partitionable(outer):
        for name, run in {
            "eagerly": program,
            "compiled": jax.jit(program),
            "batched": jax.jit(batched),
            "exported": exported(program),
            "derived": slope,
            "derived in a program": jax.jit(slope),
        }.items():
            found = np.asarray(run(x, w))
            np.testing.assert_array_equal(found, 8.0 * kept_by(inner), err_msg=name)


@pytest.mark.parametrize(("inner", "outer"), CONFIGURATIONS)
def test_kernels_draw_what_each_element_has_by_itself(inner, outer):
    """Kernels draw partitionable numbers only, in C++ and in the form for other processes."""
    with jax.threefry_partitionable(outer):
        function = traced(dropout(inner))
        in_kernel = translation.translate(function)
        in_parts = portable.portable(function, ("m", "n"))
    assert isinstance(in_kernel, str) != inner, in_kernel
    assert isinstance(in_parts, str) != inner, in_parts


@pytest.mark.usefixtures("divided_everywhere")
@pytest.mark.parametrize(("inner", "outer"), CONFIGURATIONS)
def test_divided_programs_draw_as_the_function_says(inner, outer, normal):
    def program(x, w):
        return gemm(x, w, epilogue=dropout(inner))

    x, w = put(mesh_of(), normal(64, 32), "x"), put(mesh_of(), normal(32, 48), None, "y")
    with jax.threefry_partitionable(outer):
        assert is_divided(program, x, w) == inner
        found = jax.jit(program)(x, w)
    wanted = (np.asarray(x) @ np.asarray(w)) * kept_by(inner)
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-4, atol=1e-4)


def test_what_xla_is_told():
    x = jnp.ones((8, 8))

    def epilogue(z):
        with set_xla_metadata(told="within"):
            return jnp.tanh(z)

    text = jax.jit(lambda x: gemm(x, x, epilogue=epilogue)).lower(x).as_text()
    assert 'told = "within"' in text


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="compute_on is a call by itself")
def test_host_computations_stay_there():
    def epilogue(z):
        with compute_on("device_host"):
            y = jnp.tanh(z)
        return y * 2

    function = traced(epilogue)
    for jaxpr in (function.jaxpr, function.flat, function.differentiable):
        tanh = next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "tanh")
        assert tanh.ctx.compute_type == "device_host"
    assert "device_host" in str(translation.translate(function))
    assert "device_host" in str(portable.portable(function, ("m", "n")))


def test_functions_of_other_contexts_are_others():
    made = [traced(dropout(inner)) for inner in (True, False, True)]
    assert made[0] == made[2] != made[1]

    def told(value):
        def epilogue(z):
            with set_xla_metadata(told=value) if value else contextlib.nullcontext():
                return z * 2

        return traced(epilogue)

    assert told("a") == told("a")
    assert len({told("a"), told("b"), told(None)}) == 3
