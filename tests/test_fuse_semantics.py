"""Where float32 intermediates, or a moved equation, would change the meaning of a function."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fusions import equations, operations, with_epilogues, worst
from jax import lax
from jax.experimental.compute_on import compute_on
from jax.sharding import PartitionSpec
from sharded_program import mesh_of

from jax_tcgemm import _compat, fuse

M, K, N = 128, 96, 160


@pytest.fixture
def arrays(normal):
    shapes = {"x": (M, K), "w": (K, N), "b": (N,), "d": (N, K)}
    return {name: normal(*shape, dtype=jnp.bfloat16) / 4 for name, shape in shapes.items()}


def equal(f, *args):
    """Checks that results equal those of the plain function to the last bit."""
    for own, plain in zip(*(jax.tree.leaves(jax.jit(g)(*args)) for g in (fuse(f), f)), strict=True):
        np.testing.assert_array_equal(np.asarray(own), np.asarray(plain))


@pytest.mark.parametrize("reduce", [jnp.max, jnp.min])
@pytest.mark.parametrize("activation", [jax.nn.gelu, jax.nn.silu, jnp.tanh])
def test_largest_of_a_column_is_one_of_them(arrays, reduce, activation):
    """The gradient asks which value is the largest; differently rounded values would match none."""

    def loss(w, b):
        return reduce(activation(arrays["x"] @ w + b), 0).astype(jnp.float32).sum()

    ours, theirs = (jax.grad(f, (0, 1))(arrays["w"], arrays["b"]) for f in (fuse(loss), loss))
    step = jax.jit(fuse(jax.grad(loss, (0, 1))))(arrays["w"], arrays["b"])
    for gradients in (ours, step):
        for own, plain in zip(gradients, theirs, strict=True):
            own, plain = np.asarray(own, np.float32), np.asarray(plain, np.float32)
            assert np.isfinite(own).all()
            if reduce is jnp.max:  # smallest values are nearly equal, so another one may be taken
                assert np.mean(np.abs(own - plain) > 0.05 * np.abs(plain).max()) < 0.05


def test_larger_of_two_is_one_of_them(arrays):
    """If the kernel recomputed an operand unrounded, the result would equal neither operand."""

    def loss(x, w, y):
        largest = jnp.maximum(x @ w, jnp.sin(y * 1.1) + 0.3)
        return (largest * 2).astype(jnp.float32).sum()

    y = arrays["x"] @ arrays["w"] + 0.2
    args = arrays["x"], arrays["w"], y
    for step in (jax.jit(fuse(jax.grad(loss, 2))), jax.jit(jax.grad(fuse(loss), 2))):
        ours, theirs = (np.asarray(f(*args), np.float32) for f in (step, jax.grad(loss, 2)))
        assert np.mean(theirs == 0) < 0.9
        np.testing.assert_array_equal(ours == 0, theirs == 0)


def test_largest_of_a_row_is_one_of_them(arrays):
    """A backward kernel would recompute the row and not find its largest number in it."""

    def loss(x, w, d):
        h = jax.nn.gelu(x @ w)
        scaled = h / (1 + jnp.abs(h.max(-1, keepdims=True)))
        return jnp.sin((scaled @ d).astype(jnp.float32)).sum()

    args = [arrays[name] for name in "xwd"]
    gradient = jax.grad(loss, (0, 1, 2))
    assert operations(fuse(gradient), *args)["eq"] == 1  # from XLA
    assert worst(gradient, fuse(gradient), args, slack=4) <= 1


@pytest.mark.parametrize("between", [jnp.int32, jnp.int8, jnp.bool_, jnp.float8_e4m3fn])
def test_conversions_that_lose(arrays, between):
    x, w = (jnp.round(arrays[name] * 4) for name in "xw")  # so that products are exact
    equal(lambda x, w: (x @ w).astype(between).astype(jnp.float32), x, w)
    equal(lambda x, w: (x @ w).astype(between).astype(jnp.float32) + 1, x, w)


@pytest.mark.parametrize(
    "guarded",
    [
        lambda y: jnp.where(y >= 0.25, jnp.sqrt(y - 0.25), 0),
        lambda y: jnp.where(jnp.abs(y) <= 1, jnp.arccos(y), 0),
        lambda y: jnp.where(y <= 1, jnp.sqrt(1 - y), 0),
        lambda y: jnp.sqrt(y - jnp.floor(y)),
        lambda y: jnp.sqrt(jnp.abs(y) - jnp.abs(y).astype(jnp.int32)),
        lambda y: jnp.sqrt(0.5 - jnp.abs(y - jnp.round(y))),
        lambda y: jnp.where(y < 0.125, 0, jnp.where(y < 0.125, 1, y - 0.125) ** 1.5),
    ],
)
@pytest.mark.parametrize("before", [lambda y, b: y, lambda y, b: jnp.tanh(y * 2), jnp.add])
def test_guards_of_bfloat16(arrays, before, guarded):
    """The guard and the operation that it guards read the same number."""
    x, w, b = arrays["x"], arrays["w"], arrays["b"]
    f = lambda x, w, b: guarded(before(x @ w, b))  # noqa: E731
    assert len(with_epilogues(f, x, w, b)) == 1
    assert np.isfinite(np.asarray(jax.jit(fuse(f))(x, w, b).astype(jnp.float32))).all()
    jitted = jax.jit(f)(x, w, b).astype(jnp.float32)
    np.testing.assert_allclose(fuse(f)(x, w, b).astype(jnp.float32), jitted, rtol=0.05, atol=0.1)


def test_guards_of_float16(arrays):
    x, w = arrays["x"].astype(jnp.float16) * 1e3, arrays["w"].astype(jnp.float16) * 1e3
    for f in (
        lambda x, w: jnp.nan_to_num(x @ w),
        lambda x, w: jnp.where(jnp.isfinite(x @ w), x @ w, 0),
        lambda x, w: jnp.clip(x @ w, -1, 1) * 2,
    ):
        assert np.isfinite(np.asarray(jax.jit(fuse(f))(x, w))).all()
    assert np.isinf(np.asarray(jax.jit(fuse(lambda x, w: -(x @ w)))(x, w))).any()


def test_float16(arrays):
    args = [arrays[name].astype(jnp.float16) for name in "xwbd"]

    def f(x, w, b, d):
        return x + jax.nn.gelu(x @ w + b) @ d

    assert worst(f, fuse(f), args, between=jnp.float16) <= 1


def test_what_reduces_by_a_function_is_not_elementwise(arrays):
    """A custom-derivative call contains a reduction whose function looks elementwise."""

    @jax.custom_jvp
    def over_largest(x):
        return x / lax.reduce(x, x.dtype.type(-9), lambda a, b: jnp.maximum(a, b) * 1, (0, 1))

    over_largest.defjvp(lambda p, t: (over_largest(*p), t[0]))

    def f(x, w):
        return over_largest(x @ w) + 1

    args = jnp.abs(arrays["x"]), jnp.abs(arrays["w"])
    assert worst(f, fuse(f), args) <= 1


def test_random_numbers_count_as_the_function_says(arrays):
    def f(key, x, w):
        with jax.threefry_partitionable(False):
            kept = jax.random.bernoulli(key, 0.5, (M, N))
        return jnp.where(kept, x @ w, 0)

    equal(lambda *args: f(*args) != 0, jax.random.key(0), arrays["x"], arrays["w"])


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="compute_on is a call by itself")
def test_host_computations_stay_there(arrays):
    def f(x, w):
        y = x @ w
        with compute_on("device_host"):
            return jnp.tanh(y) * 2

    eqns = equations(fuse(f), arrays["x"], arrays["w"])
    tanh = next(eqn for eqn in eqns if eqn.primitive.name == "tanh")
    assert tanh.ctx.compute_type == "device_host"


def test_loops_by_hand_with_replicated_weights(arrays):
    """Within ``shard_map``, types state what varies over the mesh; a weight's cotangent varies."""
    mesh = mesh_of((4, 2))
    spec = PartitionSpec("x")
    x = jnp.tile(arrays["x"], (4, 1))
    w, d = arrays["w"], arrays["d"]

    def looped(x, w, d):
        return lax.fori_loop(0, 2, lambda i, h: jnp.tanh(h @ w) @ d, x)

    def counted(x, w, d):
        return lax.scan(lambda c, _: ((c[0] + 1, jnp.tanh(c[1] @ w) @ d), None), (0, x), None, 2)[0]

    def layers(x, w, d):
        body = jax.checkpoint(lambda h, _: (jnp.tanh(h @ w) @ d, None))
        return lax.psum(lax.scan(body, x, None, 2)[0].astype(jnp.float32).sum(), "x")

    def summed(x, w, d):
        return jnp.logaddexp(x @ w, d[:, 0])

    for f, out in ((looped, spec), (counted, (PartitionSpec(), spec)), (summed, spec)):
        mapped = jax.shard_map(f, mesh=mesh, in_specs=(spec, None, None), out_specs=out)
        assert worst(mapped, fuse(mapped), (x, w, d), slack=4) <= 1
    total = jax.shard_map(layers, mesh=mesh, in_specs=(spec, None, None), out_specs=PartitionSpec())
    step = jax.grad(total, (1, 2))
    assert worst(step, fuse(step), (x, w, d), slack=4) <= 1


def test_long_chains(arrays):
    def f(x, w, m):
        y = x @ w
        for _ in range(160):
            m, y = jnp.sin(m), jnp.cos(y)
        return y + m

    args = arrays["x"], arrays["w"], jnp.ones((M, N), jnp.bfloat16)
    assert worst(f, fuse(f), args) <= 1


def test_many_results(arrays):
    def f(x, w):
        y, every = x @ w, []
        for _ in range(30):
            y = jnp.sin(y) * 2
            every.append(y)
        return every

    assert worst(f, fuse(f), (arrays["x"], arrays["w"]), slack=40) <= 1


def test_float32_gradients_of_groups(arrays):
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    sizes = jnp.array([50, 30, 48], jnp.int32)

    def f(a, b):
        return lax.ragged_dot_general(a, b, sizes, numbers, preferred_element_type=jnp.float32)

    a, b = arrays["x"], jnp.ones((M, N), jnp.bfloat16)
    assert worst(f, fuse(f), (a, b)) <= 1


def test_algorithms_of_unequal_factors():
    """A weight gradient exchanges its factors, so an algorithm's types must be exchanged, too."""
    algorithm = lax.DotAlgorithm(jnp.bfloat16, jnp.float32, jnp.float32, 1, 2, 3, False)
    exchanged = _compat.exchanged_precision(algorithm)
    assert exchanged == lax.DotAlgorithm(jnp.float32, jnp.bfloat16, jnp.float32, 2, 1, 3, False)
    assert _compat.exchanged_precision(("high", "highest")) == ("highest", "high")
    assert _compat.exchanged_precision(None) is None
    assert _compat.exchanged_precision(lax.DotAlgorithmPreset.BF16_BF16_F32).name == "BF16_BF16_F32"


def test_static_arguments(arrays):
    x, w = arrays["x"], arrays["w"]
    assert jax.jit(fuse(lambda x, n: (x @ w)[:n]), static_argnums=1)(x, np.int64(3)).shape == (3, N)


def test_low_part_by_reduce_precision(arrays):
    """reduce_precision states its rounding; XLA may remove a conversion and its inverse."""

    def f(x, w):
        z = lax.dot(x, w, preferred_element_type=jnp.float32)
        high = lax.reduce_precision(z, 8, 7)
        return high.astype(jnp.bfloat16), (z - high).astype(jnp.bfloat16)

    low = np.asarray(jax.jit(fuse(f))(arrays["x"], arrays["w"])[1], np.float32)
    assert np.count_nonzero(low) > 0.5 * low.size


@pytest.mark.any_jax
@pytest.mark.parametrize("compose", [lambda f: jax.jit(fuse(f)), lambda f: fuse(jax.jit(f))])
def test_no_tracer_is_kept(normal, compose):
    def loss(x, w):
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    x, w = normal(8, 16), normal(16, 16)
    with jax.checking_leaks():
        found = jax.grad(compose(loss))(x, w)
    np.testing.assert_allclose(found, jax.grad(loss)(x, w), rtol=1e-5, atol=1e-5)


def test_without_jit(arrays):
    """``jax.disable_jit`` leaves ``eval_shape`` and ``checkpoint`` that record operations."""
    x, w = arrays["x"], arrays["w"]

    def f(x, w):
        return jnp.tanh(x @ w)

    def loss(f):
        return jax.grad(lambda x, w: jnp.sum(jax.checkpoint(f)(x, w).astype(jnp.float32)))

    def without_jit(f):
        def g(x, w):
            with jax.disable_jit():
                return f(x, w)

        return g

    with jax.disable_jit():
        assert jax.eval_shape(fuse(f), x, w) == jax.eval_shape(f, x, w)
    assert worst(f, without_jit(fuse(lambda x, w: fuse(f)(x, w) + 0)), (x, w)) <= 1
    assert worst(loss(f), without_jit(loss(fuse(f))), (x, w)) <= 1
