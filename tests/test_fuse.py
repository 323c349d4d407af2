"""``fuse``: what becomes of a function's products, and that results are right."""

from __future__ import annotations

import collections
import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_calls import bf16
from fusions import worst
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from sharded_program import mesh_of

import jax_tcgemm
from jax_tcgemm import fuse
from jax_tcgemm._compat import jaxprs
from jax_tcgemm.transforms.graph import inner_nodes

# ``jax_tcgemm.transforms.fuse`` as an attribute is the function.
fuse_module = importlib.import_module("jax_tcgemm.transforms.fuse")

M, K, N = 320, 96, 128


INNER = jaxprs.CALLS | {"scan", "while", "cond", "shard_map"}


def operations(f: Any, *args: Any) -> collections.Counter[str]:
    """Counts the primitives of a function, at any depth."""
    eqns = jax.make_jaxpr(f)(*args).eqns
    return collections.Counter(x.primitive.name for eqn in eqns for x in inner_nodes(eqn, INNER))


def with_epilogues(f: Any, *args: Any) -> list[tuple[int, int]]:
    """Returns of each product with a function the numbers of its operands and results."""
    eqns = [x for eqn in jax.make_jaxpr(fuse(f))(*args).eqns for x in inner_nodes(eqn, INNER)]
    return [(len(eqn.invars), len(eqn.outvars)) for eqn in eqns if "compiled" in eqn.primitive.name]


@pytest.fixture
def arrays(normal):
    """Operands of a layer: x, two weights, a bias, the weight back, all in bfloat16."""
    shapes = {"x": (M, K), "w": (K, N), "u": (K, N), "b": (N,), "d": (N, K)}
    return {name: normal(*shape, dtype=jnp.bfloat16) / 8 for name, shape in shapes.items()}


def check(f: Any, *args: Any, **allowed: Any) -> None:
    assert worst(f, fuse(f), args, **{"slack": 1.0, **allowed}) <= 1


def layer(x, w, b):
    return jax.nn.gelu(x @ w + b)


def mlp_loss(x, w, b, d):
    y = x + jax.nn.gelu(jnp.einsum("mk,kn->mn", x, w) + b) @ d
    return jnp.mean(y.astype(jnp.float32) ** 2)


def gated_loss(x, w, u, d):
    y = x + (jax.nn.silu(x @ w) * (x @ u)) @ d
    return jnp.mean(y.astype(jnp.float32) ** 2)


def test_a_layer_is_one_kernel(arrays):
    x, w, b = (arrays[name] for name in "xwb")
    assert operations(fuse(layer), x, w, b) == {"tcgemm_compiled": 1}
    assert with_epilogues(layer, x, w, b) == [(3, 1)]
    check(layer, x, w, b)


def test_step_of_an_mlp(arrays):
    step = jax.value_and_grad(mlp_loss, argnums=(0, 1, 2, 3))
    args = [arrays[name] for name in "xwbd"]
    # The hidden layer and its preactivation; the residual; the cotangent of the preactivation with
    # the sums for the bias; the sum of two cotangents. And the gradients of two weights.
    assert with_epilogues(step, *args) == [(3, 2), (4, 2), (3, 2), (3, 1)]
    found = operations(fuse(step), *args)
    assert found["tcgemm_compiled"] == 4
    assert found["tcgemm"] == 2
    # Nothing of a matrix is left but the square of the loss.
    assert not found["transpose"]
    assert not found["dot_general"]
    assert found["reduce_sum"] == 2
    check(step, *args)


def test_step_of_a_gated_mlp(arrays):
    step = jax.value_and_grad(gated_loss, argnums=(0, 1, 2, 3))
    args = [arrays[name] for name in "xwud"]
    found = operations(fuse(step), *args)
    # Beside these the gradients of three weights, and one of the two products for that of x.
    assert (found["tcgemm_compiled"], found["tcgemm"]) == (4, 4), found
    # Two weights: the hidden layer and both products, which the derivative starts from.
    assert with_epilogues(step, *args)[0] == (3, 3)
    check(step, *args)


def test_residual_is_read_by_the_kernel(arrays):
    def f(x, w, d):
        return x + (x @ w) @ d

    x, w, d = (arrays[name] for name in "xwd")
    assert with_epilogues(f, x, w, d) == [(3, 1)]
    check(f, x, w, d)


def test_normalised_residual_is_written_once(arrays):
    """What two kernels of XLA would read of two matrices is written as one."""

    def f(x, w, d):
        y = x + (x @ w) @ d
        wide = y.astype(jnp.float32)
        wide = wide - wide.mean(-1, keepdims=True)
        return y + jnp.sin(wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True))).astype(y.dtype)

    args = [arrays[name] for name in "xwd"]
    assert with_epilogues(f, *args) == [(3, 1)]
    check(f, *args)


def test_softmax_starts_from_the_product(arrays):
    """XLA scales logits where it reads them: in float32 they were twice as large."""

    def f(x, w):
        return jax.nn.softmax((x @ w).astype(jnp.float32) * 0.125).astype(jnp.bfloat16)

    x, w = arrays["x"], arrays["w"]
    assert not with_epilogues(f, x, w)
    assert operations(fuse(f), x, w)["tcgemm"] == 1
    check(f, x, w)


def test_float32_results(arrays):
    def f(x, w):
        return (x @ w).astype(jnp.float32)

    x, w = arrays["x"], arrays["w"]
    assert operations(fuse(f), x, w) == {"tcgemm": 1}
    with jax.enable_x64(True):
        exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    np.testing.assert_allclose(fuse(f)(x, w), exact, atol=1e-5)


def test_gradient_of_a_weight_is_not_transposed(arrays):
    x, w = arrays["x"], arrays["w"]
    step = jax.grad(lambda w: (x @ w).astype(jnp.float32).sum())
    assert operations(step, w)["transpose"] == 1
    assert not operations(fuse(step), w)["transpose"]
    check(step, w)


def test_dropout_is_drawn_by_the_kernel(arrays):
    x, w = arrays["x"], arrays["w"]
    key = jax.random.key(3)

    def f(x, w, shape=(M, N)):
        kept = jax.random.bernoulli(key, 0.9, shape)
        return jnp.where(kept, x @ w / 0.9, 0).astype(x.dtype)

    wide = jax.ShapeDtypeStruct((8192, K), x.dtype), jax.ShapeDtypeStruct((K, 8192), x.dtype)
    assert operations(fuse(functools.partial(f, shape=(8192, 8192))), *wide)["random_bits"] == 0
    # Few are drawn in less time by a kernel of their own.
    assert operations(fuse(f), x, w)["random_bits"] == 1
    check(f, x, w)


def test_mask_that_others_read_is_drawn_once(arrays):
    x, w = arrays["x"], arrays["w"]

    def f(x, w):
        kept = jax.random.bernoulli(jax.random.key(3), 0.9, (M, N))
        return jnp.where(kept, x @ w / 0.9, 0).astype(x.dtype), kept

    assert operations(fuse(f), x, w)["random_bits"] == 1
    check(f, x, w)


def test_what_depends_on_a_region_stays_out_of_it(arrays):
    """A value on the way leaves the region, and comes back as a row's maximum."""
    x, w = arrays["x"], arrays["w"]

    def f(x, w):
        z = jnp.tanh(x @ w)
        return (z / z.max(-1, keepdims=True) + z).astype(jnp.bfloat16), z

    check(f, x, w)


def test_two_products_that_read_each_other(arrays):
    """Each region could take the other's product; both cannot."""
    x, w, u = (arrays[name] for name in "xwu")

    def f(x, w, u):
        p, q = jnp.sin(x @ w), jnp.cos(x[::-1] @ u)
        return jnp.exp(-(p * q)), p + q

    check(f, x, w, u)


@pytest.mark.parametrize("activation", [jax.nn.relu, jax.nn.softplus, jax.nn.leaky_relu])
def test_custom_derivatives_stay(arrays, activation):
    """``fuse`` before ``grad``: at a tie ``relu`` has a derivative of its own."""
    x, w, b = (arrays[name] for name in "xwb")

    def f(x, w, b):
        return activation(x @ w + b).astype(jnp.float32).sum()

    assert with_epilogues(lambda *a: activation(a[0] @ a[1] + a[2]), x, w, b) == [(3, 1)]
    at_a_tie = jax.grad(fuse(f), argnums=2)(jnp.zeros_like(x), w, jnp.zeros_like(b))
    expected = jax.grad(f, argnums=2)(jnp.zeros_like(x), w, jnp.zeros_like(b))
    np.testing.assert_array_equal(at_a_tie, expected)


def test_grad_jvp_and_vmap_of_fused(arrays):
    x, w, b = (arrays[name] for name in "xwb")

    def f(x, w, b):
        return layer(x, w, b).astype(jnp.float32)

    def derived(g):
        tangent = jax.jvp(lambda x: g(x, w, b), (x,), (x,))[1]
        gradient = jax.grad(lambda w: (g(x, w, b) * g(x, w, b)).sum())(w)
        return tangent, gradient, jax.vmap(g, (None, 0, None))(x, jnp.stack([w, w]), b)

    check_equal(derived(fuse(f)), derived(f))


# Control flow


def scanned(x, w, d):
    return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w) @ d, h.sum()), x, None, length=3)


def looped(x, w, d):
    return jax.lax.fori_loop(0, 3, lambda _, h: jnp.tanh(h @ w) @ d, x)


def branching(x, w, d):
    return jax.lax.cond(x.sum() > 0, lambda: jnp.tanh(x @ w) @ d, lambda: x @ w @ d + x)


def rematerialised(x, w, d):
    f = jax.checkpoint(lambda x: (jnp.tanh(x @ w) @ d).astype(jnp.float32).sum())
    return jax.value_and_grad(f)(x)


def by_hand(x, w, d):
    mesh = mesh_of((4, 2))
    spec = PartitionSpec("x")

    def f(x, w, d):
        return jnp.tanh(x @ w) @ d

    return jax.shard_map(f, mesh=mesh, in_specs=(spec, None, None), out_specs=spec)(x, w, d)


def donating(x, w, d):
    return jax.jit(lambda h: jnp.tanh(h @ w) @ d, donate_argnums=0)(x + 1)


@pytest.mark.parametrize("f", [scanned, looped, branching, rematerialised, by_hand, donating])
def test_control_flow(arrays, f):
    args = [arrays[name] for name in "xwd"]
    found = operations(fuse(f), *args)
    assert found["tcgemm_compiled"]
    assert not found["dot_general"]
    check(f, *args, slack=4)


def test_donation_stays(arrays):
    (eqn,) = (
        eqn
        for eqn in jax.make_jaxpr(fuse(donating))(*(arrays[name] for name in "xwd")).eqns
        if eqn.params.get("donated_invars")
    )
    assert eqn.params["donated_invars"][-1]


def test_residuals_that_scan_stacks_are_made_of_one(arrays):
    """XLA writes what it stacks where that lies; what a kernel wrote it would copy."""
    x, w, b, d = (arrays[name] for name in "xwbd")

    def loss(w, b, d):
        def body(h, _):
            return jax.nn.gelu(h @ w + b) @ d, None

        return jax.lax.scan(body, x, None, length=2)[0].astype(jnp.float32).sum()

    # The hidden layer, and what the others are made of.
    assert with_epilogues(jax.grad(loss, argnums=(0, 1, 2)), w, b, d)[0][1] == 2


def test_custom_vjp_stays_as_it_is(arrays):
    x, w = arrays["x"], arrays["w"]
    f = jax.custom_vjp(lambda x: jnp.tanh(x @ w))
    f.defvjp(lambda x: (f(x), x), lambda x, ct: (x * 2,))
    assert operations(fuse(lambda x: f(x)), x)["dot_general"] == 1
    np.testing.assert_array_equal(
        jax.grad(lambda x: fuse(f)(x).astype(jnp.float32).sum())(x), 2 * x
    )


def test_effects_keep_their_order(arrays):
    x, w = arrays["x"], arrays["w"]
    seen: list[str] = []

    def note(name, value):
        jax.experimental.io_callback(lambda _: seen.append(name), None, value, ordered=True)

    def f(x, w):
        p = x @ w
        note("first", p.sum())
        bias = jnp.sin(w[0])
        note("second", bias.sum())
        return jnp.tanh(p + bias)

    jax.block_until_ready(fuse(f)(x, w))
    jax.effects_barrier()
    assert seen == ["first", "second"]


# What else a call may hold


def test_other_arguments(arrays):
    x, w = arrays["x"], arrays["w"]

    def f(arrays, scale=2.0, *, activation=None, flag=False):
        y = arrays["x"] @ arrays["w"] * scale
        return {"y": activation(y) if flag else y, "none": None}

    got = fuse(f)({"x": x, "w": w}, 0.5, activation=jnp.tanh, flag=True)
    expected = f({"x": x, "w": w}, 0.5, activation=jnp.tanh, flag=True)
    assert got["none"] is None
    np.testing.assert_allclose(
        *(np.asarray(z["y"], np.float32) for z in (got, expected)), atol=0.01
    )
    assert fuse(f).__name__ == "f"


def test_float32_models_take_the_products(normal):
    x, w = normal(M, K), normal(K, N)

    def f(x, w):
        return jax.nn.relu(x @ w + 1)

    found = operations(fuse(f), x, w)
    assert found["tcgemm"] == 1
    assert not found["tcgemm_compiled"]
    with jax.default_matmul_precision("highest"):
        check(f, x, w, slack=4, between=jnp.float32)


def test_few_rows_stay_without_an_epilogue(monkeypatch):
    """A kernel for few rows has none; the function follows the product as it is written."""
    said: list[str] = []
    monkeypatch.setattr(fuse_module, "log", said.append)
    f = jax.jit(lambda x, w: jnp.tanh(x @ w))
    assert operations(fuse(f), bf16(16, K), bf16(K, N)) == {"tcgemm": 1, "tanh": 1}
    assert any("no epilogue (16 x 128 results" in line for line in said)


@pytest.mark.parametrize("count", [8, 15])
def test_more_operands_than_a_kernel_reads(arrays, count):
    x, w = arrays["x"], arrays["w"]

    def f(x, w, *others):
        y = x @ w
        for i, other in enumerate(others):
            y = jnp.sin(y) * other + i
        return y

    others = [bf16_of(arrays["w"], i) for i in range(count)]
    # What a kernel cannot read at once XLA reads for the rest of it, so that nothing is saved.
    assert with_epilogues(f, x, w, *others) == ([(10, 1)] if count == 8 else [])
    check(f, x, w, *others)


def bf16_of(like, seed):
    return jax.random.normal(jax.random.key(seed), (M, like.shape[1])).astype(like.dtype)


def test_products_over_groups(normal):
    x, w = (normal(*s, dtype=jnp.bfloat16) / 8 for s in ((M, K), (3, K, N)))
    sizes = jnp.array([100, 120, 100])

    def loss(x, w):
        return jax.nn.silu(jax.lax.ragged_dot(x, w, sizes)).astype(jnp.float32).sum()

    found = operations(fuse(jax.value_and_grad(loss, argnums=(0, 1))), x, w)
    assert found["tcgemm_compiled_ragged"] == 1
    assert found["tcgemm_ragged_dot"] + found["tcgemm_ragged_contraction"] == 2, found
    assert not found["ragged_dot_general"]
    got = jax.value_and_grad(fuse(loss), argnums=(0, 1))(x, w)
    step = fuse(jax.value_and_grad(loss, argnums=(0, 1)))(x, w)
    expected = jax.value_and_grad(loss, argnums=(0, 1))(x, w)
    for one in (got, step):
        for a, b in zip(*map(jax.tree.leaves, (one, expected)), strict=True):
            a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
            np.testing.assert_allclose(a, b, atol=0.02 * np.abs(b).max())


@pytest.mark.parametrize(
    ("numbers", "shapes", "is_fused"),
    [
        ((((2,), (0,)), ((), ())), ((4, 40, K), (K, N)), True),  # tokens of a batch
        ((((0, 1), (0, 1)), ((), ())), ((4, 40, K), (4, 40, N)), True),  # gradient of a weight
        ((((2, 3), (0, 1)), ((), ())), ((4, 40, 6, 16), (6, 16, N)), True),  # heads, merged
        ((((2,), (2,)), ((0,), (0,))), ((3, 80, K), (3, N, K)), True),  # a batch
        ((((2,), (0,)), ((), ())), ((4, 40, K), (K, 8, 16)), False),  # heads, split
        ((((3,), (3,)), ((0, 2), (0, 2))), ((2, 80, 3, K), (2, 80, 3, K)), False),  # attention
    ],
)
def test_layouts(normal, numbers, shapes, is_fused):
    operands = [normal(*shape, dtype=jnp.bfloat16) / 8 for shape in shapes]

    def f(a, b):
        return jnp.tanh(jax.lax.dot_general(a, b, numbers))

    assert bool(with_epilogues(f, *operands)) == is_fused
    assert not operations(fuse(f), *operands)["dot_general"]
    check(f, *operands)


# Several devices, export


def test_sharded_operands(arrays, divided_everywhere):
    mesh = mesh_of((4, 2))
    step = jax.value_and_grad(mlp_loss, argnums=(0, 1, 2, 3))
    specs = {"x": ("x",), "w": (None, "y"), "b": ("y",), "d": ("y",)}
    args = [
        jax.device_put(arrays[name], NamedSharding(mesh, PartitionSpec(*spec)))
        for name, spec in specs.items()
    ]
    check_equal(jax.jit(fuse(step))(*args), jax.jit(step)(*args))


def test_explicit_axes(arrays):
    """Types say where arrays lie: the products are ours, without an epilogue."""
    mesh = mesh_of((4, 2), AxisType.Explicit)
    with jax.set_mesh(mesh):
        x = jax.device_put(arrays["x"], NamedSharding(mesh, PartitionSpec("x", None)))
        w, b = (jax.device_put(arrays[i], NamedSharding(mesh, PartitionSpec())) for i in "wb")
        ours, theirs = jax.jit(fuse(layer))(x, w, b), jax.jit(layer)(x, w, b)
        assert ours.sharding == theirs.sharding
        check_equal(ours, theirs)


def check_equal(ours: Any, theirs: Any) -> None:
    for own, other in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        own, other = np.asarray(own, np.float32), np.asarray(other, np.float32)
        np.testing.assert_allclose(own, other, atol=0.02 * np.abs(other).max())


def test_export(arrays):
    args = [arrays[name] for name in "xwb"]
    checks = jax_tcgemm.export_disabled_checks()
    export = functools.partial(jax.export.export, platforms=["cpu"], disabled_checks=checks)
    exported = export(jax.jit(fuse(layer)))(*args)
    again = jax.export.deserialize(exported.serialize())
    check_equal(again.call(*args), layer(*args))


def test_source_lines_and_names_stay(arrays):
    def f(x, w):
        with jax.named_scope("block"):
            return jnp.tanh(x @ w)

    text = jax.jit(fuse(f)).lower(arrays["x"], arrays["w"]).as_text(debug_info=True)
    assert "block" in text


def test_graph_of_plain_calls_alone():
    """A call that says where its result lies stays one."""
    mesh = mesh_of((4, 2))
    placed = NamedSharding(mesh, PartitionSpec("x"))
    inner = jax.jit(lambda x: x + 1, out_shardings=placed)
    eqns = jax.make_jaxpr(lambda x: jax.jit(lambda x: x * 2)(inner(x)))(jnp.ones(8)).eqns
    assert [jaxprs.plain_call(eqn) is None for eqn in eqns] == [True, False]
