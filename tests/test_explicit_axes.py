"""Meshes with explicit axes: our rules give the types and values that ``jnp`` gives."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_call import assert_trees_close, square_sum
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from sharded_checks import put, size, spec_of, vector_of
from sharded_program import TARGET, mesh_of

from jax_tcgemm import (
    dot_general,
    fuse,
    gated_gemm,
    gated_mlp,
    gated_ragged_dot,
    gemm,
    mlp,
    ragged_dot,
)

pytestmark = pytest.mark.usefixtures("divided_everywhere")


@pytest.fixture
def explicit():
    return mesh_of((4, 2), AxisType.Explicit)


SIZES = jnp.array([30, 0, 20, 10])

EXPLICIT = {
    "gemm": (gemm, jnp.matmul, [(64, 32), (32, 48)]),
    "gated_gemm": (
        lambda x, w: gated_gemm(x, w, w),
        lambda x, w: jax.nn.silu(x @ w) * (x @ w),
        [(64, 32), (32, 48)],
    ),
    "mlp": (
        lambda x, w: mlp(x, w, None, w.T),
        lambda x, w: jax.nn.gelu(x @ w) @ w.T,
        [(64, 32), (32, 48)],
    ),
    "gated_mlp": (
        lambda x, w: gated_mlp(x, w, w, w.T),
        lambda x, w: (jax.nn.silu(x @ w) * (x @ w)) @ w.T,
        [(64, 32), (32, 48)],
    ),
}


@pytest.mark.parametrize(
    "specs",
    [
        (("x",), ("y",)),
        pytest.param((("x",), ()), marks=pytest.mark.any_jax),
        pytest.param((("x", "y"), ()), marks=pytest.mark.any_jax),
    ],
)
@pytest.mark.parametrize("name", EXPLICIT)
def test_explicit_axes(explicit, normal, name, specs):
    ours, theirs, shapes = EXPLICIT[name]
    with jax.set_mesh(explicit):
        pairs = zip(shapes, specs, strict=True)
        args = [put(explicit, normal(*shape) / 4, *spec) for shape, spec in pairs]
        for mine, other in ((ours, theirs), (vector_of(ours), vector_of(theirs))):
            assert TARGET in jax.jit(mine).lower(*args).as_text()
            actual, expected = jax.jit(mine)(*args), jax.jit(other)(*args)
            types, wanted = (jax.tree.map(spec_of, y) for y in (actual, expected))
            assert types == wanted
            assert_trees_close(actual, expected, 1e-3)
            # Each product moves the fewest bytes, but XLA gathers an operand of two of its products
            # once.
            assert size(mine, *args) <= 1.05 * size(other, *args)


def _dropout(p, key):
    return jnp.where(jax.random.bernoulli(key, 0.5, p.shape), 2 * p, 0)


@pytest.mark.parametrize(
    "f",
    [
        lambda p, _: jax.nn.relu(p),
        lambda p, _: (jax.nn.silu(p), jnp.ones(p.shape)),
        lambda p, _: (p, jnp.where(p.sum(-1) > 0, p.sum(-1), 0.0), jax.nn.logsumexp(p, 0)),
        lambda p, _: jax.lax.fori_loop(0, 2, lambda _, y: jnp.sin(y), p),
        _dropout,
    ],
)
def test_functions_on_explicit_axes(explicit, normal, f):
    """JAX gives constants and random numbers the sharding of the product beside them."""
    key = jax.random.key(7)

    def of_square(g):
        return lambda x, w: square_sum(lambda *y: jax.tree.leaves(g(*y))[0])(x, w)

    with jax.set_mesh(explicit):
        x, w = put(explicit, normal(64, 32) / 4, "x"), put(explicit, normal(32, 48), None, "y")
        ours = lambda x, w: gemm(x, w, epilogue=f, epilogue_operands=(key,))  # noqa: E731
        theirs = lambda x, w: f(x @ w, key)  # noqa: E731
        for transformed in (lambda g: g, lambda g: jax.grad(of_square(g), (0, 1))):
            actual, expected = (jax.jit(transformed(g))(x, w) for g in (ours, theirs))
            assert jax.tree.map(spec_of, actual) == jax.tree.map(spec_of, expected)
            assert_trees_close(actual, expected, 1e-3)


def test_operands_of_a_function_that_are_sharded_unlike_the_product(explicit, normal):
    f = lambda p, y: (2 * p, p + jnp.where(y > 0, y, 0.0))  # noqa: E731
    with jax.set_mesh(explicit):
        x, w = (put(explicit, normal(*shape) / 4) for shape in ((64, 32), (32, 64)))
        y = put(explicit, normal(64, 64), None, "x")
        got = jax.jit(lambda *a: gemm(*a[:2], epilogue=f, epilogue_operands=a[2:]))(x, w, y)
        expected = jax.jit(lambda x, w, y: f(x @ w, y))(x, w, y)
        assert jax.tree.map(spec_of, got) == jax.tree.map(spec_of, expected)
        assert_trees_close(got, expected, 1e-3)


def test_out_sharding(explicit, normal):
    """If both contraction dimensions are sharded, the caller must give out_sharding, as for jnp."""
    with jax.set_mesh(explicit):
        x, w = put(explicit, normal(64, 32), None, "x"), put(explicit, normal(32, 48), "x")
        for out in (P(), P("x"), P(None, ("x", "y")), P("y", "x")):
            for ours, theirs in (
                (gemm, jnp.matmul),
                (lambda x, w, out_sharding: gated_gemm(x, w, w, out_sharding=out_sharding), None),
                (
                    lambda x, w, out_sharding: dot_general(
                        x, w, (((1,), (0,)), ((), ())), out_sharding=out_sharding
                    ),
                    jnp.matmul,
                ),
                (lambda x, w, out_sharding: mlp(x, w, None, w.T, out_sharding=out_sharding), None),
            ):
                run = jax.jit(functools.partial(ours, out_sharding=out))
                assert jax.typeof(run(x, w)).sharding.spec == P(*out, *(None,) * (2 - len(out)))
                if theirs is not None:
                    expected = jax.jit(functools.partial(theirs, out_sharding=out))(x, w)
                    assert_trees_close(run(x, w), expected, 1e-3)
                    own, other = (
                        jax.grad(square_sum(functools.partial(f, out_sharding=out)), (0, 1))
                        for f in (ours, theirs)
                    )
                    assert_trees_close(jax.jit(own)(x, w), jax.jit(other)(x, w), 1e-3)
        for function in (gemm, lambda x, w: gated_gemm(x, w, w)):
            with pytest.raises(Exception, match="out_sharding"):
                jax.jit(function)(x, w)
        with pytest.raises(TypeError, match="out_sharding"):
            gemm(x, w, out_sharding="x")


def test_groups_on_explicit_axes(explicit, normal):
    with jax.set_mesh(explicit):
        x, w = put(explicit, normal(64, 32), "x"), put(explicit, normal(4, 32, 48), None, None, "y")
        expected = ragged_dot(np.asarray(x), np.asarray(w), SIZES)
        result = jax.jit(ragged_dot)(x, w, SIZES)
        assert jax.typeof(result).sharding.spec == P("x", "y")
        assert_trees_close(result, expected, 1e-3)
        derivative = vector_of(lambda x, w: ragged_dot(x, w, SIZES))
        gradients = jax.jit(derivative)(x, w)
        assert [*map(spec_of, gradients)] == [P("x", None), P(None, None, "y")]
        assert_trees_close(gradients, derivative(np.asarray(x), np.asarray(w)), 1e-3)
        experts = put(explicit, normal(4, 32, 48), "x")
        gated = jax.jit(functools.partial(gated_ragged_dot, out_sharding=P(None, "y")))
        result = gated(np.asarray(x), experts, experts, SIZES)
        assert jax.typeof(result).sharding.spec == P(None, "y")


def test_vmap_over_an_explicit_axis(explicit, normal):
    with jax.set_mesh(explicit):
        x, w = put(explicit, normal(4, 16, 32), "x"), put(explicit, normal(32, 48), None, "y")
        actual, expected = (jax.jit(jax.vmap(f, (0, None)))(x, w) for f in (gemm, jnp.matmul))
        assert jax.typeof(actual).sharding == jax.typeof(expected).sharding
        assert_trees_close(actual, expected, 1e-3)


@pytest.mark.parametrize("kinds_of_axes", [("Explicit", "Auto"), ("Auto", "Explicit")])
def test_some_explicit_axes(normal, kinds_of_axes):
    types = tuple(AxisType[name] for name in kinds_of_axes)
    mesh = jax.make_mesh((4, 2), ("x", "y"), types, devices=jax.devices("cpu")[:8])
    with jax.set_mesh(mesh):
        own = "x" if kinds_of_axes[0] == "Explicit" else "y"
        x, w = put(mesh, normal(64, 32) / 4, own), put(mesh, normal(32, 48) / 4)
        for name in EXPLICIT:
            ours, theirs, _ = EXPLICIT[name]
            for mine, other in ((ours, theirs), (vector_of(ours), vector_of(theirs))):
                actual, expected = jax.jit(mine)(x, w), jax.jit(other)(x, w)
                assert jax.tree.map(spec_of, actual) == jax.tree.map(spec_of, expected)
                assert_trees_close(actual, expected, 1e-3)


def test_sums_that_are_yet_to_be_made(explicit, normal):
    with jax.set_mesh(explicit):
        x, w = put(explicit, normal(64, 32), None, "x"), put(explicit, normal(32, 48), "x")
        out = P(None, None, unreduced={"x"})
        for function in (gemm, lambda x, w, **kw: gated_gemm(x, w, w, **kw)):
            with pytest.raises(NotImplementedError, match="leaves sums to be made"):
                jax.jit(functools.partial(function, out_sharding=out))(x, w)
        dims = (((1,), (0,)), ((), ()))
        result = jax.jit(lambda x, w: dot_general(x, w, dims, out_sharding=out))(x, w)
        assert spec_of(result) == out
        reshard = jax.reshard if hasattr(jax, "reshard") else jax.sharding.reshard
        expected = np.asarray(x) @ np.asarray(w)
        assert_trees_close(jax.jit(lambda y: reshard(y, P(None, None)))(result), expected, 1e-3)
        reduced = reshard(put(explicit, normal(4, 32, 48)), P(None, None, None, reduced={"x"}))
        with pytest.raises(NotImplementedError, match="sums over mesh axes"):
            ragged_dot(np.asarray(x), reduced, SIZES)


def test_an_addend_beside_c_goes_where_the_result_does(explicit, normal):
    with jax.set_mesh(explicit):
        x, w = put(explicit, normal(64, 32), None, "x"), put(explicit, normal(32, 48), "x")
        c, r = put(explicit, normal(64, 48), "y"), put(explicit, normal(64, 48), None, "x")
        run = jax.jit(functools.partial(gemm, activation="relu", out_sharding=P("x")))
        result = run(x, w, c, residual=r)
        expected = jax.nn.relu(np.asarray(x) @ np.asarray(w) + np.asarray(c)) + np.asarray(r)
        assert spec_of(result) == P("x", None)
        assert_trees_close(result, expected, 1e-3)


@pytest.mark.parametrize("activation", [jnp.tanh, jax.nn.gelu])
def test_derivatives_on_some_manual_axes(explicit, normal, activation):
    """The other axes are explicit: no operation may claim that there is no mesh."""

    def mapped(x, w):
        return activation(x @ w)

    def gradient(f):
        return jax.grad(lambda x: jnp.sum(f(x).astype(jnp.float32)))

    with jax.set_mesh(explicit):
        x = put(explicit, normal(64, 32, dtype=jnp.bfloat16), "x")
        w = normal(32, 48, dtype=jnp.bfloat16)
        specs = {"in_specs": (P("x"), P()), "out_specs": P("x"), "axis_names": {"x"}}
        f = jax.shard_map(mapped, **specs)
        ours, plain = (gradient(lambda x, g=g: g(x, w))(x) for g in (fuse(f), f))
        inside = jax.shard_map(fuse(mapped), **specs)
        also = gradient(lambda x: inside(x, w))(x)
    for each in (ours, also):
        assert jax.typeof(each) == jax.typeof(plain)
        np.testing.assert_allclose(
            np.asarray(each, np.float32), np.asarray(plain, np.float32), rtol=0.05, atol=0.05
        )


@jax.custom_jvp
def scaled_square(x):
    return 3 * x * x


@scaled_square.defjvp
def _scaled_square_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    return 3 * x * x, 6 * x * t


@pytest.mark.parametrize("inner", [lambda f: f, jax.jit, jax.checkpoint])
def test_rules_of_a_user_within_shard_map(normal, inner):
    """JAX keeps a rule with values that vary over axes, and the epilogue has no axes."""
    mesh = mesh_of((8,))
    x, w = normal(64, 32, dtype=jnp.bfloat16), normal(32, 48, dtype=jnp.bfloat16)

    def f(x, w):
        return inner(scaled_square)(x @ w)

    def gradient(f):
        mapped = jax.shard_map(f, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
        return jax.jit(jax.grad(lambda x: jnp.sum(mapped(x, w).astype(jnp.float32))))(x)

    ours, plain = (np.asarray(gradient(g), np.float32) for g in (fuse(f), f))
    np.testing.assert_allclose(ours, plain, rtol=0.05, atol=0.05 * np.max(np.abs(plain)))
