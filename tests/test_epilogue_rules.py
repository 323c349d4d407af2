"""Custom derivatives, effects and axes within epilogues, and symbolic shapes."""

from __future__ import annotations

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify, io_callback
from jax.sharding import PartitionSpec as P
from sharded_program import mesh_of

import jax_tcgemm
from jax_tcgemm import gated_gemm, gated_mlp, gemm, mlp, ragged_dot

pytestmark = pytest.mark.any_jax


def test_custom_vjp_as_an_epilogue(normal):
    @jax.custom_vjp
    def clipped(x):
        return jnp.clip(x, -1, 1)

    clipped.defvjp(lambda x: (clipped(x), None), lambda _, ct: (ct,))  # straight through
    a, b = normal(8, 16, dtype=jnp.bfloat16), normal(16, 8, dtype=jnp.bfloat16)
    grad = jax.grad(lambda a: gemm(a, b, epilogue=clipped).sum())(a)
    expected = jnp.ones((8, 8)) @ b.T.astype(jnp.float32)
    np.testing.assert_allclose(
        np.asarray(grad, np.float32), np.asarray(expected), rtol=0.02, atol=0.02
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scaled_back(factor, x):
    return x


_scaled_back.defvjp(lambda factor, x: (x, None), lambda factor, _, ct: (ct * factor,))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _scaled_along(factor, x):
    return x


_scaled_along.defjvp(lambda factor, x, t: (x[0], t[0] * factor))


@pytest.mark.parametrize("rule", [_scaled_back, _scaled_along])
def test_rules_with_other_arguments_are_other_functions(rule, normal):
    x, w = normal(4, 8), normal(8, 8)
    slopes = [
        jax.grad(lambda x, n=n: gemm(x, w, epilogue=lambda z: rule(n, jnp.sin(z))).sum())(x)
        for n in (2.0, 3.0)
    ]
    np.testing.assert_allclose(slopes[1], slopes[0] * 1.5, rtol=1e-5, atol=1e-5)


def test_custom_vjp_under_vmap_and_in_part(normal):
    x, w, bias = normal(4, 8), normal(8, 8), normal(8)
    f = lambda z, b: _scaled_back(2.0, z + b)  # noqa: E731

    def ours(x, b):
        return gemm(x, w, epilogue=f, epilogue_operands=(b,))

    def theirs(x, b):
        return f(x @ w, b)

    for each in (
        lambda g: jax.vmap(jax.grad(lambda x: g(x, bias).sum()))(x[None]),
        lambda g: jax.jacrev(g)(x, bias),
        lambda g: jax.jacrev(g, 1)(x, bias),
        lambda g: jax.grad(lambda b: g(x, b).sum())(bias),
    ):
        np.testing.assert_allclose(each(ours), each(theirs), rtol=1e-5, atol=1e-5)


def test_symbolic_shapes_of_several_scopes():
    for _ in range(2):
        m, k = jax.export.symbolic_shape("m,64")
        types = (
            jax.ShapeDtypeStruct((m, k), jnp.float32),
            jax.ShapeDtypeStruct((64, 32), jnp.float32),
        )
        grad = jax.grad(lambda a, b: gemm(a, b, epilogue=jnp.sin).sum(), (0, 1))
        exported = jax.export.export(
            jax.jit(grad), disabled_checks=jax_tcgemm.export_disabled_checks()
        )(*types)
        assert exported.out_avals[1].shape == (64, 32)


def _printing(z):
    jax.debug.print("{}", z.sum())
    return z


def _checked(z):
    checkify.check(jnp.all(z > 0), "negative")
    return z


def _called_back(z):
    return z * io_callback(lambda: np.float32(2), jax.ShapeDtypeStruct((), jnp.float32))


@jax.custom_jvp
def _prints_when_differentiated(z):
    return z


@_prints_when_differentiated.defjvp
def _(primals, tangents):
    return _printing(primals[0]), tangents[0]


def _of_groups(x, function):
    return jax_tcgemm.ragged_dot(x, x[None], jnp.array([8]), epilogue=function)


@pytest.mark.parametrize("function", [_printing, _checked, _called_back])
def test_effects_are_refused(function, normal):
    """The primitive could not have them, and would drop what has no result."""
    x = normal(8, 8)
    for call in (gemm, jax.jit(gemm, static_argnames="epilogue")):
        with pytest.raises(TypeError, match=r"side effects \['\w+Effect'\]"):
            call(x, x, epilogue=function)
    for call in (lambda f: mlp(x, x, None, x, epilogue=f), lambda f: _of_groups(x, f)):
        with pytest.raises(TypeError, match="side effects"):
            call(function)


def test_effects_of_a_derivative_are_refused(normal):
    x = normal(8, 8)
    f = lambda x: gemm(x, x, epilogue=_prints_when_differentiated).sum()  # noqa: E731
    np.testing.assert_allclose(f(x), (x @ x).sum(), rtol=1e-4, atol=1e-4)
    with pytest.raises(TypeError, match="side effects"):
        jax.jit(jax.grad(f))(x)


def test_caller_arrays_that_change_are_refused(normal):
    x, counter = normal(8, 8), jax.new_ref(jnp.float32(2))

    def counting(z):
        counter[...] += 1
        return z

    with pytest.raises(TypeError, match="side effects"):
        jax.jit(lambda x: gemm(x, x, epilogue=counting))(x)


def test_named_axes_are_refused(normal):
    """A function with an axis of ``vmap`` cannot be traced without the axis."""
    x = normal(3, 8, 8)
    for function in (lambda z: z - lax.pmean(z, "i"), lambda z: z * lax.axis_index("i")):
        with pytest.raises(TypeError, match=r"named axes \['i'\]"):
            jax.vmap(lambda x, f=function: gemm(x, x, epilogue=f), axis_name="i")(x)


@pytest.mark.parametrize("checks", [True, False])
def test_axes_of_shard_map(checks, normal):
    x, w = normal(16, 8), normal(8, 8)

    def part(x, w):
        return gemm(x, w, epilogue=lambda z: z * lax.axis_index("x"))

    run = jax.shard_map(
        part, mesh=mesh_of((4,)), in_specs=(P("x"), P()), out_specs=P("x"), check_vma=checks
    )
    if checks:
        with pytest.raises(TypeError, match=r"named axes \['x'\]"):
            run(x, w)
        return
    expected = (x @ w) * jnp.repeat(jnp.arange(4), 4)[:, None]
    np.testing.assert_allclose(run(x, w), expected, rtol=1e-4, atol=1e-4)


def test_second_gradients_of_custom_vjp_are_refused(normal):
    """JAX differentiates what ``fwd`` computes, and the kernel computes the function."""
    sine = jax.custom_vjp(jnp.sin)
    sine.defvjp(lambda p: (jnp.sin(p), p), lambda p, g: (jnp.cos(p) * g,))
    x, w, sizes = normal(3, 4), normal(4, 5), jnp.array([3])
    for f in (
        lambda x: gemm(x, w, epilogue=sine),
        lambda x: ragged_dot(x, w[None], sizes, epilogue=sine),
    ):
        first = jax.grad(lambda x, f=f: (f(x) ** 2).sum())
        with pytest.raises(NotImplementedError, match=r"jax\.custom_vjp; accepted"):
            jax.grad(lambda x, first=first: first(x).sum())(x)


def test_operands_without_a_function_are_refused(normal):
    x, w = normal(4, 8), normal(8, 8)
    for call in (
        lambda **more: gemm(x, w, **more),
        lambda **more: gated_gemm(x, w, w, **more),
        lambda **more: mlp(x, w, None, w, **more),
        lambda **more: gated_mlp(x, w, w, w, **more),
        lambda **more: ragged_dot(x, w[None], jnp.array([4]), **more),
    ):
        with pytest.raises(ValueError, match="no effect without epilogue="):
            call(epilogue_operands=(x,))
        for operands in (x, None):
            with pytest.raises(TypeError, match=r"must be a tuple.*epilogue_operands=\(array,\)"):
                call(epilogue=lambda z, y: z + y, epilogue_operands=operands)


def test_transposes_of_what_is_not_linear(normal):
    x, w, sizes = normal(4, 8), normal(8, 8), jnp.array([4])
    for f in (
        lambda x: gemm(x, w, activation="relu"),
        lambda x: gemm(x, w, epilogue=jnp.tanh),
        lambda x: gated_gemm(x, w, w),
        lambda x: ragged_dot(x, w[None], sizes, activation="relu"),
    ):
        with pytest.raises(NotImplementedError, match="Transpose rule"):
            jax.linear_transpose(f, x)(x)
