"""``fuse`` of programs: control flow, effects, several devices, export."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fusions import (
    check,
    check_equal,
    layer,
    layer_arrays,
    mlp_loss,
    operations,
    with_epilogues,
)
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from sharded_program import mesh_of

import jax_tcgemm
from jax_tcgemm import fuse
from jax_tcgemm._compat import jaxprs
from jax_tcgemm.lowering import jit_rows


@pytest.fixture
def arrays(normal):
    return layer_arrays(normal)


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
    (program,) = jax.make_jaxpr(fuse(donating))(*(arrays[name] for name in "xwd")).eqns
    calls = [eqn.params.get("donated_invars") for eqn in program.params["jaxpr"].eqns]
    assert [x for x in calls if x] == [(False, False, True)]


def test_residuals_that_scan_stacks_are_made_of_one(arrays):
    """XLA writes what scan stacks in place; it would copy what a kernel wrote."""
    x, w, b, d = (arrays[name] for name in "xwbd")

    def loss(w, b, d):
        def body(h, _):
            return jax.nn.gelu(h @ w + b) @ d, None

        return jax.lax.scan(body, x, None, length=2)[0].astype(jnp.float32).sum()

    # The hidden layer, and the array from which the other residuals are computed.
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
    """Types contain shardings: our kernels compute the products, without an epilogue."""
    mesh = mesh_of((4, 2), AxisType.Explicit)
    with jax.set_mesh(mesh):
        x = jax.device_put(arrays["x"], NamedSharding(mesh, PartitionSpec("x", None)))
        w, b = (jax.device_put(arrays[i], NamedSharding(mesh, PartitionSpec())) for i in "wb")
        ours, theirs = jax.jit(fuse(layer))(x, w, b), jax.jit(layer)(x, w, b)
        assert ours.sharding == theirs.sharding
        check_equal(ours, theirs)


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
    """A call that states its result's sharding stays a call."""
    mesh = mesh_of((4, 2))
    placed = NamedSharding(mesh, PartitionSpec("x"))
    inner = jax.jit(lambda x: x + 1, out_shardings=placed)
    eqns = jax.make_jaxpr(lambda x: jax.jit(lambda x: x * 2)(inner(x)))(jnp.ones(8)).eqns
    assert [jaxprs.plain_call(eqn) is None for eqn in eqns] == [True, False]


def test_kernels_begin_to_compile_before_the_program_is_lowered(arrays, monkeypatch):
    """Kernels of several regions compile at the same time."""
    begun = []
    monkeypatch.setattr(jit_rows, "expected_row", lambda call, spec: ("row", "nn"))
    monkeypatch.setattr(jit_rows.nvrtc, "find", lambda: None)
    monkeypatch.setattr(jit_rows.compiler, "begin", lambda *kernel: begun.append(kernel))
    x, w, b, d = (arrays[name] for name in "xwbd")
    jax.make_jaxpr(fuse(lambda x: jnp.tanh(jax.nn.gelu(x @ w + b) @ d)))(x)
    assert [kernel[1:] for kernel in begun] == [("row", "nn")] * 2
    assert len({source for source, *_ in begun}) == 2
