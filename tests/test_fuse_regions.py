"""A region's reads, writes and remaining equations if other code uses its values as well."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from fusions import check_equal, with_epilogues, worst
from trace_times import Program, recurrent, transformer

from jax_tcgemm import fuse
from jax_tcgemm.transforms import kernel_calls, outputs

pytestmark = pytest.mark.any_jax


@pytest.fixture
def arrays(normal):
    names = ("x", "w", "w2", "u", "v")
    shape = {"x": (256, 128), "w": (128, 256), "w2": (256, 256)}
    return {name: normal(*shape.get(name, (256, 256)), dtype=jnp.bfloat16) / 8 for name in names}


def norm(x, scale):
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    return (wide * scale.astype(jnp.float32)).astype(x.dtype)


def test_layer_between_two_norms(normal):
    """In Gemma 2 and OLMo 2, other code uses a value earlier: recomputed, never written."""
    shapes = {"r": (128, 128), "a": (128, 128), "w": (128, 128), "s1": (128,), "s2": (128,)}
    args = [normal(*shape, dtype=jnp.bfloat16) for shape in shapes.values()]

    def loss(r, a, w, s1, s2):
        return jnp.sin((norm(r + norm(a, s1), s2) @ w).astype(jnp.float32)).sum()

    step = jax.grad(loss, argnums=(0, 1, 2, 3, 4))
    assert worst(step, fuse(step), args, slack=4) <= 1


@pytest.mark.parametrize(
    "use",
    [
        # Uses: splitting q, k and v; labels; the last token. XLA reads the bias in these uses.
        lambda y: jax.nn.silu(y[:, :128]) * y[:, 128:],
        lambda y: sum(map(jnp.sin, jnp.split(y, 2, axis=1))),
        lambda y: jax.nn.logsumexp(y.astype(jnp.float32), 1) - y.astype(jnp.float32)[:, 7],
        lambda y: y.astype(jnp.float32).max(1) + y.astype(jnp.float32)[jnp.arange(256), 2],
    ],
)
def test_a_value_is_not_written_for_those_who_read_parts_of_it(arrays, use):
    def f(x, w, bias):
        return use(x @ w + bias)

    args = arrays["x"], arrays["w"], arrays["u"][0]
    assert not with_epilogues(f, *args)
    check_equal(fuse(f)(*args), f(*args))


@pytest.mark.parametrize(
    "further",
    [
        lambda z, p: (z * p).max(1),
        lambda z, p: (jnp.sin(z) + p).max(1),
        lambda z, p: (jnp.cos(z) * p).max(1),
    ],
)
def test_operand_that_is_needed_before_the_region(arrays, further):
    """Arguments determine ``p``; another product reads ``p``, and the region reads that product."""

    def f(x, w, w2, u, v):
        p = jnp.tanh(u) * v
        z = x @ w
        other = p @ w2
        h = jnp.tanh(z) * p + u - v + other
        return h, further(z, p)

    args = list(arrays.values())
    assert worst(f, fuse(f), args, slack=4) <= 1
    assert with_epilogues(f, *args)


def test_stochastic_depth_and_layer_scale(arrays):
    def f(x, w, w2, key):
        h = x @ w
        for i in range(3):
            kept = jax.random.bernoulli(jax.random.fold_in(key, i), 0.8, (256, 1))
            branch = jax.nn.gelu(h @ w2) @ w2 * (0.1 * w2[0])
            h = h + jnp.where(kept, branch / 0.8, 0).astype(h.dtype)
        return h.astype(jnp.float32).sum()

    args = [arrays[name] for name in ("x", "w", "w2")]
    key = jax.random.key(0)
    step = jax.value_and_grad(lambda *xs: f(*xs, key), argnums=(0, 1, 2))
    assert worst(step, fuse(step), args, slack=4) <= 1


def test_nodes_of_a_region_without_a_kernel(arrays):
    """Other readers may keep these nodes in the program; each variable is computed once."""
    x, w = arrays["x"], arrays["w"][:, :64]  # kernels for up to 64 columns have no epilogue

    def f(x, w):
        z = x @ w
        y = jnp.tanh(z) * 2
        return y + 1, (y * 3).max(1), jnp.sin(y).sum()

    with jax.enable_checks(True):
        assert worst(f, fuse(f), (x, w)) <= 1
        closed = jax.make_jaxpr(fuse(f))(x, w)
    made = [var for eqn in closed.eqns[0].params["jaxpr"].eqns for var in eqn.outvars]
    assert len(made) == len(set(made))


def test_transpose_without_a_derivative(arrays):
    x, w = arrays["w2"], arrays["u"]

    def linear(x):
        return (x @ w) * 2 + x, (x.T @ w).astype(jnp.float32).sum(0)

    assert with_epilogues(linear, x)
    cotangents = arrays["v"], jnp.ones(256, jnp.float32)
    check_equal(*(jax.linear_transpose(f, x)(cotangents) for f in (fuse(linear), linear)))


def _count(monkeypatch, program: Program) -> tuple[int, int]:
    """Counts the traced regions and products, and the choices of results."""
    found: list[object] = []
    traced = kernel_calls.traced

    def counted(item):
        found.append(item)
        return traced(item)

    monkeypatch.setattr(kernel_calls, "traced", counted)
    outputs.written.cache_clear()
    jax.jit(fuse(program.function)).trace(*program.arguments)
    monkeypatch.setattr(kernel_calls, "traced", traced)
    return len(found), outputs.written.cache_info().misses


def test_equal_layers_are_traced_once(monkeypatch):
    few, many = (_count(monkeypatch, transformer(layers)) for layers in (4, 12))
    assert few == many


def test_choices_for_equal_steps_are_made_once(monkeypatch):
    few, many = (_count(monkeypatch, recurrent(steps)) for steps in (60, 120))
    assert few == many
