"""Trains a transformer block sharded over several devices, beside the same in plain jnp.

There are four layouts:

- ``data``: each device has its sequences and all weights.
- ``fsdp``: weights are sharded as well, and gathered when they are used.
- ``tensor``: one mesh axis shards heads and hidden units, the other axis sequences.
- ``expert``: a mixture of experts, which are on different devices.

The program only states the shardings of arrays (``NamedSharding``); ``jax.jit`` partitions it. Both
models start from the same weights and learn the output of another block. The script prints the
losses, the bytes that each training step moves, and its time. It fails if the losses part, or if it
gathers anything that plain jnp does not gather.

It runs on the GPUs of the machine if there are several, else on eight CPU devices. On CPU devices,
products are partitioned as on GPUs but computed by XLA. Run it with ``python
examples/sharded_transformer.py``; ``--help`` lists the arguments.
"""

import argparse
import collections
import functools
import os
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

# JAX reads the first variable when it first uses a CPU, and we read the second when a program is
# lowered for one.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("JAX_TCGEMM_PARTITION", "everywhere")

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tcgemm
from jax_tcgemm.tools.collectives import collectives

Parameters = dict[str, jax.Array]
# The largest accepted relative difference between the losses of a step.
LOSS_TOLERANCE = {"float32": 0.02, "bfloat16": 0.05}


class Size(NamedTuple):
    """The extents of a block."""

    batch: int
    length: int
    width: int
    heads: int
    hidden: int
    experts: int


def initial(key: jax.Array, size: Size, layout: str) -> Parameters:
    """Returns the weights, in float32."""
    head = size.width // size.heads
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(
        ("query", "key", "value"), (size.width, size.heads, head)
    )
    shapes["out"] = (size.width, size.width)
    experts = (size.experts,) if layout == "expert" else ()
    shapes |= dict.fromkeys(("gate", "up"), (*experts, size.width, size.hidden))
    shapes["down"] = (*experts, size.hidden, size.width)
    if layout == "expert":
        shapes["router"] = (size.width, size.experts)
    keys = jax.random.split(key, len(shapes))
    fan_in = {name: size.hidden if name == "down" else size.width for name in shapes}
    return {
        name: jax.random.normal(key, shape) * fan_in[name] ** -0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


# The shardings of arrays: each weight on axes "data" and "model" of the mesh, and the sequences.
EVERY = ("data", "model")
_WEIGHTS: tuple[str, ...] = ("query", "key", "value", "out", "gate", "up", "down")
_FSDP: dict[str, P] = dict.fromkeys(_WEIGHTS, P(EVERY))
_HEADS: dict[str, P] = dict.fromkeys(_WEIGHTS[:3], P(None, "model"))
LAYOUTS: dict[str, tuple[P, dict[str, P]]] = {
    "data": (P(EVERY), {}),
    "fsdp": (P(EVERY), _FSDP),
    "tensor": (
        P("data"),
        _HEADS
        | {"out": P("model"), "gate": P(None, "model"), "up": P(None, "model"), "down": P("model")},
    ),
    "expert": (
        P("data"),
        _HEADS | {"out": P("model"), "gate": P("model"), "up": P("model"), "down": P("model")},
    ),
}


# The products of a block, by jax_tcgemm and by jnp


def plain_residual(x, w, residual):
    """Computes a product and adds the residual."""
    return x @ w + residual


def plain_gated(x, gate, up, down, residual):
    """Computes a gated layer and the next, and adds the residual."""
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down + residual


def plain_gated_groups(x, gate, up, sizes):
    """Computes the gated layer of each expert."""
    g, u = (jax.lax.ragged_dot(x, w, sizes) for w in (gate, up))
    return jax.nn.silu(g) * u


def fused_residual(x, w, residual):
    """Computes the same; the kernel adds the residual."""
    return jax_tcgemm.gemm(x, w, residual=residual)


def fused_gated(x, gate, up, down, residual):
    """Computes the same by two kernels."""
    return jax_tcgemm.gated_mlp(x, gate, up, down, residual=residual)


class Products(NamedTuple):
    """The products of a block."""

    dot_general: Callable
    residual: Callable
    gated: Callable
    gated_groups: Callable
    groups: Callable


PRODUCTS = {
    "jax_tcgemm": Products(
        jax_tcgemm.dot_general,
        fused_residual,
        fused_gated,
        jax_tcgemm.gated_ragged_dot,
        jax_tcgemm.ragged_dot,
    ),
    "jnp": Products(
        jax.lax.dot_general,
        plain_residual,
        plain_gated,
        plain_gated_groups,
        jax.lax.ragged_dot,
    ),
}


def normalized(x: jax.Array) -> jax.Array:
    """Scales rows to a mean square of 1."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def attention(p: Parameters, x: jax.Array, by: Products) -> jax.Array:
    """Returns causal attention of ``x``, (batch, length, width), plus ``x``."""
    einsum = functools.partial(jnp.einsum, _dot_general=by.dot_general)
    y = normalized(x)
    q, k, v = (einsum("btd,dhe->bthe", y, p[name]) for name in ("query", "key", "value"))
    scores = einsum("bthe,bshe->bhts", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    shares = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)).astype(x.dtype)
    mixed = einsum("bhts,bshe->bthe", shares, v)
    return by.residual(mixed.reshape(x.shape), p["out"], x)


def mixture(p: Parameters, x: jax.Array, by: Products) -> jax.Array:
    """Returns the layers of the expert that a router prefers for each row of ``x``, plus ``x``."""
    rows = x.reshape(-1, x.shape[-1])
    y = normalized(rows)
    scores = jax.nn.softmax((y @ p["router"]).astype(jnp.float32))
    expert = jnp.argmax(scores, -1)
    order = jnp.argsort(expert)
    sizes = jnp.bincount(expert, length=scores.shape[1]).astype(jnp.int32)
    hidden = by.gated_groups(y[order], p["gate"], p["up"], sizes)
    out = by.groups(hidden, p["down"], sizes)[jnp.argsort(order)]
    return x + (out * scores.max(-1, keepdims=True).astype(x.dtype)).reshape(x.shape)


def block(p: Parameters, x: jax.Array, by: Products) -> jax.Array:
    """Computes one transformer block."""
    x = attention(p, x, by)
    if "router" in p:
        return mixture(p, x, by)
    return by.gated(normalized(x), p["gate"], p["up"], p["down"], x)


# Training


def train_step(parameters, x, wanted, dtype, name):
    """Takes a float32 gradient descent step; returns the weights and the loss before it."""

    def loss(parameters):
        p = {key: value.astype(dtype) for key, value in parameters.items()}
        d = block(p, x.astype(dtype), PRODUCTS[name]).astype(jnp.float32) - wanted
        return jnp.mean(d**2)

    value, gradients = jax.value_and_grad(loss)(parameters)
    return jax.tree.map(lambda p, g: p - 2.0 * g, parameters, gradients), value


def compiled_step(mesh: Mesh, layout: str, state: Parameters, batch: list, dtype, name: str):
    """Compiles a step that keeps the weights' shardings."""
    where = jax.tree.map(lambda x: x.sharding, state)
    step = jax.jit(
        functools.partial(train_step, dtype=dtype, name=name),
        out_shardings=(where, NamedSharding(mesh, P())),
        donate_argnums=0,
    )
    return step.lower(state, *batch).compile()


def trained(step, state: Parameters, batch: list, steps: int) -> tuple[list[float], float]:
    """Returns the loss of each step and the seconds of one step."""
    losses, seconds = [], []
    for _ in range(steps):
        start = time.perf_counter()
        state, loss = jax.block_until_ready(step(state, *batch))
        seconds.append(time.perf_counter() - start)
        losses.append(float(loss))
    return losses, statistics.median(seconds)


def run(layout: str, mesh: Mesh, size: Size, dtype: jnp.dtype, steps: int, seed: int) -> None:
    """Trains both models in one layout and prints the results.

    Raises:
        SystemExit: the losses part, or more is gathered than in plain jnp.
    """
    keys = jax.random.split(jax.random.key(seed), 3)
    rows, weights = LAYOUTS[layout]
    parameters, teacher = (initial(key, size, layout) for key in keys[:2])
    x = jax.random.normal(keys[2], (size.batch, size.length, size.width))
    wanted = block(teacher, x, PRODUCTS["jnp"])
    batch = [jax.device_put(value, NamedSharding(mesh, rows)) for value in (x, wanted)]
    losses, moved = {}, {}
    for name in PRODUCTS:
        state = {
            key: jax.device_put(jnp.copy(value), NamedSharding(mesh, weights.get(key, P())))
            for key, value in parameters.items()
        }
        step = compiled_step(mesh, layout, state, batch, dtype, name)
        moved[name] = collectives(step.as_text() or "", mesh.size)
        losses[name], seconds = trained(step, state, batch, steps)
        kinds = collections.Counter(each.kind for each in moved[name])
        size_moved = sum(each.received for each in moved[name]) / 2**20
        what = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "nothing"
        print(
            f"{layout:>6} {name:>10}: loss {losses[name][0]:.4f} -> {losses[name][-1]:.4f}, "
            f"{seconds * 1e3:8.2f} ms a step, {size_moved:7.2f} MiB: {what}"
        )
    tolerance = LOSS_TOLERANCE[dtype.name]
    for ours, theirs in zip(*losses.values(), strict=True):
        if not abs(ours - theirs) <= tolerance * theirs:
            raise SystemExit(f"FAILED: {layout}: the losses {ours} and {theirs} part")
    gathers = [sum(each.kind == "all-gather" for each in own) for own in moved.values()]
    if gathers[0] > gathers[1]:
        raise SystemExit(f"FAILED: {layout}: {gathers[0]} all-gathers where jnp has {gathers[1]}")


def main(arguments: list[str] | None = None) -> None:
    """Trains in each layout.

    Raises:
        SystemExit: see ``run``.
    """
    parser = argparse.ArgumentParser(
        description="Trains a transformer block over several devices by jax_tcgemm and by jnp."
    )
    parser.add_argument("--layouts", nargs="+", choices=sorted(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--dtype", choices=sorted(LOSS_TOLERANCE), default="float32")
    for name, extent in Size(16, 64, 64, 4, 256, 8)._asdict().items():
        parser.add_argument(f"--{name}", type=int, default=extent)
    parser.add_argument("--platform", help="cpu or gpu; by default GPUs if there are several")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)

    devices = jax.devices(args.platform)
    if len(devices) == 1 and args.platform is None:
        devices = jax.devices("cpu")
    model = 2 if len(devices) % 2 == 0 else 1
    shape = (len(devices) // model, model)
    mesh = jax.make_mesh(shape, EVERY, (AxisType.Auto,) * 2, devices=devices)
    print(f"{args.dtype}, {len(devices)} x {devices[0].device_kind}, mesh {dict(mesh.shape)}")
    size = Size(*(getattr(args, name) for name in Size._fields))
    for layout in args.layouts:
        run(layout, mesh, size, jnp.dtype(args.dtype), args.steps, args.seed)
    print("OK: equal within rounding, and nothing is gathered that jnp does not gather")


if __name__ == "__main__":
    main()
