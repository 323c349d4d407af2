"""Weights that `fuse` packs before the loops that read them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P

from jax_tcgemm import fuse, gemm, quantize
from jax_tcgemm._compat import jaxprs
from jax_tcgemm.lowering import packed as packed_lowering
from jax_tcgemm.lowering import packed_layout
from jax_tcgemm.primitives import unpacked as primitive
from jax_tcgemm.transforms import loops

pytestmark = pytest.mark.usefixtures("small_weights_are_packed")

K, LAYERS, TURNS = 128, 3, 3
ONE, STACK = (2, 2, 128, 16), (LAYERS, 2, 2, 128, 16)


@pytest.fixture
def args(normal):
    """Returns rows, one weight and a stack of weights."""
    weights = [quantize(normal(K, K) * K**-0.5, jnp.int4, tile=(64, 1)) for _ in range(LAYERS)]
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights)
    return normal(4, K, dtype=jnp.bfloat16), weights[0], stack


def layer(x, q):
    groups = q.qvalue.reshape(-1, 64, K).astype(x.dtype) * q.scale[:, None].astype(x.dtype)
    return jnp.tanh(x @ groups.reshape(K, K))


def layers(x, stack):
    return lax.scan(lambda x, q: (layer(x, q), None), x, stack)[0]


def repeated(body, x):  # the terms of the sums do not cancel
    return lax.scan(lambda x, _: (body(x), jnp.abs(x).sum()), x, None, length=TURNS)


def turns(body, *state):
    return lax.while_loop(lambda s: s[0] < TURNS, lambda s: (s[0] + 1, *body(*s[1:])), (0, *state))


def permuted_twice(x, q, stack):
    """Two products with a weight whose rows move before it is packed."""
    scale = (jnp.max(q.scale, 0, keepdims=True) / 4).astype(x.dtype)

    def weight():
        values = q.qvalue.reshape(64, 2, K).transpose(1, 0, 2).reshape(K, K)
        return values.astype(x.dtype) * scale

    return repeated(lambda x: jnp.tanh(x @ weight() + jnp.sin(x) @ weight()), x)


# The loop around each operation that packs, 0 outside of all loops, and what it packs.
LOOPS = {
    "scan": (lambda x, q, stack: repeated(lambda x: layer(x, q), x), [(0, ONE)]),
    "jit": (lambda x, q, stack: repeated(jax.jit(lambda x: layer(x, q)), x), [(0, ONE)]),
    "transposed": (lambda x, q, stack: repeated(lambda x: layer(x, q.T.T), x), [(0, ONE)]),
    "map": (lambda x, q, stack: lax.map(lambda x: layer(x[None], q), x), [(0, ONE)]),
    "fori_loop": (
        lambda x, q, stack: lax.fori_loop(0, TURNS, lambda i, x: layer(x, q), x),
        [(0, ONE)],
    ),
    "while": (lambda x, q, stack: turns(lambda x: (layer(x, q),), x), [(0, ONE)]),
    "a weight in the state": (
        lambda x, q, stack: turns(lambda x, q: (layer(x, q), q), x, q)[:2],
        [(0, ONE)],
    ),
    "layers": (lambda x, q, stack: layers(x, stack), [(1, ONE)]),
    "layers in a scan": (
        lambda x, q, stack: repeated(lambda x: layers(x, stack), x),
        [(0, STACK)],
    ),
    "layers in a while": (
        lambda x, q, stack: turns(lambda x: (layers(x, stack),), x),
        [(0, STACK)],
    ),
    "both": (
        lambda x, q, stack: repeated(lambda x: layer(layers(x, stack), q), x),
        [(0, ONE), (0, STACK)],
    ),
    "three loops": (
        lambda x, q, stack: repeated(lambda x: repeated(lambda x: layers(x, stack), x)[0], x),
        [(0, STACK)],
    ),
    "a weight that changes": (
        lambda x, q, stack: turns(
            lambda x, q: (layer(x, q), jax.tree.map(lambda y: jnp.roll(y, 1, 1), q)), x, q
        )[:2],
        [(1, ONE)],
    ),
    "two weights by turns": (
        lambda x, q, stack: turns(
            lambda x, q, p: (layer(x, q), p, q), x, q, jax.tree.map(lambda y: y[1], stack)
        )[:2],
        [(1, ONE)],
    ),
    "reversed": (
        lambda x, q, stack: lax.scan(
            lambda x, p: (layer(layer(x, p), q), jnp.abs(x).sum()), x, stack, reverse=True, unroll=2
        ),
        [(0, ONE), (1, ONE)],
    ),
    "a branch": (
        lambda x, q, stack: repeated(
            lambda x: lax.cond(x[0, 0] > -2, lambda x: layer(x, q), lambda x: x, x), x
        ),
        [(1, ONE)],
    ),
    "layers in remat": (
        lambda x, q, stack: repeated(jax.checkpoint(lambda x: layers(x, stack)), x),
        [(2, ONE)],
    ),
    "layers in a condition": (
        lambda x, q, stack: lax.while_loop(
            lambda s: layers(s[1], stack).sum() < s[0] * 1e9 - 1, lambda s: (s[0] - 1, s[1]), (1, x)
        ),
        [(2, ONE)],
    ),
    "one weight twice": (
        lambda x, q, stack: repeated(lambda x: layer(x, q) + layer(jnp.sin(x), q), x),
        [(0, ONE)],
    ),
    "one permuted weight twice": (permuted_twice, [(0, ONE)]),
    "no layers": (
        lambda x, q, stack: repeated(lambda x: layers(x, jax.tree.map(lambda y: y[:0], stack)), x),
        [(2, ONE)],
    ),
    "no turns": (
        lambda x, q, stack: lax.scan(lambda x, _: (layer(x, q), None), x, None, length=0),
        [(0, ONE)],
    ),
    "gemm": (
        lambda x, q, stack: repeated(lambda x: jnp.tanh(gemm(x, q)), x),
        [(0, ONE)],
    ),
    "remat": (
        lambda x, q, stack: repeated(jax.checkpoint(lambda x: layer(x, q)), x),
        [(1, ONE)],
    ),
}


def packing(jaxpr, depth=0):
    """Returns the number of loops around each operation that packs, and the packed shape."""
    found = []
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "tcgemm_pack":
            found.append((depth, eqn.outvars[0].aval.shape))
        inner = depth + (name in ("scan", "while"))
        for value in eqn.params.values():
            for each in map(jaxprs.jaxpr_of, value if type(value) is tuple else (value,)):
                found += [] if each is None else packing(each, inner)
    return sorted(found)


def assert_close(found, theirs, exact, rounding):
    """Checks that the error is at most twice that of the other results, and a rounding."""
    for ours, other, wanted in zip(*map(jax.tree.leaves, (found, theirs, exact)), strict=True):
        assert ours.dtype == other.dtype
        ours, other, wanted = (np.asarray(y, np.float64) for y in (ours, other, wanted))
        allowed = 2 * np.linalg.norm(other - wanted) + rounding * np.linalg.norm(wanted)
        assert np.linalg.norm(ours - wanted) <= allowed


def assert_right(found, f, x, *others):
    """Compares with the function itself, both against float32."""
    assert_close(found, *(jax.jit(f)(y, *others) for y in (x, x.astype(jnp.float32))), 2**-7)


@pytest.mark.parametrize("name", LOOPS)
def test_loops(args, name):
    f, expected = LOOPS[name]
    assert packing(jax.make_jaxpr(fuse(f))(*args).jaxpr) == expected
    assert_right(jax.jit(fuse(f))(*args), f, *args)


@pytest.fixture
def by_packed_values():
    """Multiplies by the packed values on CPUs, too; returns the products lowered so."""
    lowered = []

    def product(x, values, packed, scale, *zero, spec):
        lowered.append(spec)
        own = spec.packed(values, scale, zero)
        strips = packed_layout.pack_scales(scale, zero[0] if zero else None, own.qtype)
        return packed_lowering.reference(x, packed, strips, spec=own)

    rules = mlir._platform_specific_lowerings["cpu"]
    mlir.register_lowering(primitive.unpacked_p, mlir.lower_fun(product), platform="cpu")
    yield lowered
    del rules[primitive.unpacked_p]


@pytest.mark.parametrize("name", LOOPS)
def test_each_turn_has_its_packed_weights(args, name, by_packed_values):
    f, _ = LOOPS[name]
    program = jax.jit(lambda *args: fuse(f)(*args))  # no other test compiled this function
    assert_right(program(*args), f, *args)
    assert by_packed_values or name in ("no layers", "no turns")  # JAX drops these loops


@pytest.mark.parametrize("name", ["scan", "layers in a scan", "reversed"])
def test_derivatives(args, name):
    """The error against float32 is at most twice that of the same program without `fuse`."""
    f, _ = LOOPS[name]
    x, q, stack = args

    def derivatives(f, x, scale):
        def function(x, scale):
            own = q.__class__(q.qvalue, scale, None, q.qtype)
            return f(x, own, stack)[0].astype(jnp.float32)

        y, pull = jax.vjp(function, x, scale)
        dy = jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)
        pushed = jax.jvp(function, (x, scale), (jnp.ones_like(x), jnp.ones_like(scale)))
        return *pull(dy), *pushed

    ours, theirs = (jax.jit(lambda *z, f=f: derivatives(f, *z))(x, q.scale) for f in (fuse(f), f))
    exact = jax.jit(lambda *z: derivatives(f, *z))(x.astype(jnp.float32), q.scale)
    assert_close(ours, theirs, exact, 2**-8)


def test_a_batch_of_rows(args):
    f, expected = LOOPS["layers in a scan"]
    x, *weights = args
    batch = jnp.stack([x, 2 * x])
    mapped = [jax.vmap(g, (0, None, None)) for g in (fuse(f), f)]
    assert packing(jax.make_jaxpr(mapped[0])(batch, *weights).jaxpr) == expected
    assert_right(jax.jit(mapped[0])(batch, *weights), mapped[1], batch, *weights)


def test_a_loop_within_shard_map(args):
    f, expected = LOOPS["both"]
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def divided(*args):
        y, sums = f(*args)
        return y, lax.psum(sums, "x")

    g = jax.shard_map(divided, mesh=mesh, in_specs=(P("x"), P(), P()), out_specs=(P("x"), P(None)))
    assert packing(jax.make_jaxpr(fuse(g))(*args).jaxpr) == expected
    assert_right(jax.jit(fuse(g))(*args), g, *args)


@pytest.mark.any_jax
def test_copies_that_would_fill_the_memory(args, monkeypatch):
    f, _ = LOOPS["both"]
    monkeypatch.setattr(loops, "_MOST_BYTES", (LAYERS + 1) * K * K // 2)
    assert packing(jax.make_jaxpr(fuse(f))(*args).jaxpr) == [(0, ONE), (0, STACK)]
    monkeypatch.setattr(loops, "_MOST_BYTES", K * K // 2 - 1)
    assert packing(jax.make_jaxpr(fuse(f))(*args).jaxpr) == [(1, ONE), (2, ONE)]


@pytest.mark.any_jax
def test_copies_take_a_share_of_the_memory(args, monkeypatch):
    class Gpu:
        def memory_stats(self):
            return {"bytes_limit": 8 * K * K // 2}

    f, expected = LOOPS["scan"]
    monkeypatch.setattr(loops._compat, "initialized_cuda_devices", lambda: [Gpu()])
    assert loops._most_bytes() == K * K // 2
    with jax.default_device(jax.devices("cpu")[0]):
        assert packing(jax.make_jaxpr(fuse(f))(*args).jaxpr) == expected
        monkeypatch.setattr(loops, "_MOST_SHARE", 9)
        assert packing(jax.make_jaxpr(fuse(f))(*args).jaxpr) == [(1, ONE)]


@pytest.mark.any_jax
def test_a_budget_that_lacks_room_for_all_layers(args, monkeypatch):
    """Weights outside the stack are packed before the loop if they alone have room."""
    f, _ = LOOPS["both"]
    monkeypatch.setattr(loops, "_MOST_BYTES", K * K // 2)
    assert packing(jax.make_jaxpr(fuse(f))(*args).jaxpr) == [(0, ONE), (2, ONE)]
    assert [x.way for x in fuse(f).report(*args)] == ["kernel"] * 2
    assert_right(jax.jit(fuse(f))(*args), f, *args)


@pytest.mark.any_jax
def test_a_batch_of_conditions(args):
    """`vmap` makes a loop with a condition for each example."""
    x, q, _ = args

    def f(limit, x, q):
        body = lambda s: (s[0] + 1, layer(s[1], q))  # noqa: E731
        return lax.while_loop(lambda s: s[0] < limit, body, (0, x))[1]

    mapped = jax.vmap(f, (0, None, None))
    run = lambda g: lambda x: g(jnp.arange(3), x, q)  # noqa: E731
    assert_right(jax.jit(run(fuse(mapped)))(x), run(mapped), x)


@pytest.mark.any_jax
def test_a_mutable_array_in_a_loop(args):
    def f(x, q, stack):
        total = jax.new_ref(jnp.zeros((), jnp.float32))

        def body(x):
            y = layer(layers(x, stack), q)
            total[...] += jnp.square(y.astype(jnp.float32)).sum()
            return y

        y, _ = repeated(body, x)
        return y, total[...]

    assert_right(jax.jit(fuse(f))(*args), f, *args)


@pytest.mark.any_jax
def test_symbolic_lengths(args):
    x, q, stack = args
    (b,) = jax.export.symbolic_shape("b")

    def f(xs, q, stack):
        return lax.scan(lambda c, x: (layer(layers(c, stack), q), c + x), xs[0], xs)

    types = jax.tree.map(lambda y: jax.ShapeDtypeStruct(y.shape, y.dtype), (q, stack))
    stacks = jax.tree.map(lambda y: jax.ShapeDtypeStruct((b, *y.shape[1:]), y.dtype), types[1])
    rows = jax.ShapeDtypeStruct((b, *x.shape), x.dtype)
    exported = jax.export.export(jax.jit(fuse(f)))(rows, types[0], stacks)
    xs = jnp.stack([x] * LAYERS)
    assert_right(exported.call(xs, q, stack), f, xs, q, stack)


@pytest.mark.any_jax
def test_loops_with_effects(args, capfd):
    def f(x, q, stack):
        def body(x):
            jax.debug.print("turn {}", x.shape[0])
            return layer(x, q)

        return repeated(body, x)

    assert packing(jax.make_jaxpr(fuse(f))(*args).jaxpr) == [(0, ONE)]
    jax.block_until_ready(jax.jit(fuse(f))(*args))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("turn 4") == TURNS
