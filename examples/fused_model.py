"""Trains a transformer written without this package, plain and under ``jax_tcgemm.fuse``.

The model is a decoder in plain ``jax.numpy``: layers by ``lax.scan``, each under
``jax.checkpoint``, RMSNorm, attention, a gated layer, weights in float32, products in bfloat16, and
Adam by Optax. ``fuse`` rewrites the whole training step. The task is to learn which token follows
which. The script prints both losses, the number of products that became kernels with an epilogue,
and the wall time of a step. It fails if the losses part or the model learns nothing.

Run it with ``python examples/fused_model.py``; ``--help`` lists the arguments.
"""

import argparse
import collections
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jax_tcgemm

# The largest accepted relative difference between the losses of a step: rounding differs, and
# training amplifies it.
TOLERANCE = 0.05

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Extents of the model and of a batch."""

    layers: int
    width: int
    hidden: int
    heads: int
    vocabulary: int
    batch: int
    tokens: int


SMALL = Shape(layers=2, width=128, hidden=256, heads=4, vocabulary=64, batch=8, tokens=32)
LARGE = Shape(4, width=2048, hidden=8192, heads=16, vocabulary=8192, batch=4, tokens=2048)


def init(key: jax.Array, shape: Shape) -> Params:
    """Returns the weights, in float32; layer weights have a leading dimension of layers."""
    width, hidden = shape.width, shape.hidden
    matrices = {
        **dict.fromkeys(("q", "k", "v", "o"), (width, width)),
        **dict.fromkeys(("gate", "up"), (width, hidden)),
        "down": (hidden, width),
    }
    keys = iter(jax.random.split(key, len(matrices) + 1))
    layers = {
        name: jax.random.normal(next(keys), (shape.layers, *extents)) * extents[0] ** -0.5
        for name, extents in matrices.items()
    }
    gains = {name: jnp.ones((shape.layers, width)) for name in ("gain1", "gain2")}
    embedding = jax.random.normal(next(keys), (shape.vocabulary, width))
    return {"layers": layers | gains, "embedding": embedding}


def rms_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    """Returns the rows of ``x``, each scaled to mean square 1, times the gain."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
    return (wide * scale).astype(x.dtype) * gain


def layer(x: jax.Array, w: Params, shape: Shape) -> jax.Array:
    """Returns ``(batch, tokens, width)`` after attention and the gated layer."""
    h = rms_norm(x, w["gain1"])
    q, k, v = ((h @ w[name]).reshape(*x.shape[:2], shape.heads, -1) for name in ("q", "k", "v"))
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + mixed.reshape(x.shape) @ w["o"]
    h = rms_norm(x, w["gain2"])
    return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]


def loss_of(params: Params, tokens: jax.Array, shape: Shape) -> jax.Array:
    """Returns the mean cross entropy of each next token."""
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    x = half["embedding"][tokens[:, :-1]]
    body = jax.checkpoint(lambda x, w: (layer(x, w, shape), None))
    x, _ = jax.lax.scan(body, x, half["layers"])
    x = rms_norm(x, jnp.ones(shape.width, x.dtype))
    logits = (x @ half["embedding"].T).astype(jnp.float32) * shape.width**-0.5
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def make_step(shape: Shape) -> tuple[optax.GradientTransformation, Callable[..., Any]]:
    """Returns the optimizer and a training step of ``(params, state, tokens)``."""
    optimizer = optax.adam(3e-3 if shape is SMALL else 3e-4)

    def step(params: Params, state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(params, tokens, shape)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    return optimizer, step


def batches(key: jax.Array, shape: Shape, steps: int) -> Iterator[jax.Array]:
    """Yields tokens, ``(batch, tokens + 1)``: each token always has the same successor."""
    follower = jax.random.permutation(key, shape.vocabulary)
    for each in jax.random.split(key, steps):
        token = jax.random.randint(each, (shape.batch,), 0, shape.vocabulary)
        _, rest = jax.lax.scan(lambda x, _: (follower[x], x), token, None, shape.tokens + 1)
        yield rest.T


def kernels(jaxpr: Any) -> collections.Counter[str]:
    """Counts this package's primitives in a jaxpr, at any depth."""
    found: collections.Counter[str] = collections.Counter()
    for eqn in jaxpr.eqns:
        found[eqn.primitive.name] += eqn.primitive.name.startswith("tcgemm")
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            found += kernels(inner) if hasattr(inner, "eqns") else collections.Counter()
    return +found


def times_of(steps: dict[str, Any], given: Any, reps: int) -> dict[str, list[float]]:
    """Returns the wall times of compiled steps in seconds; the steps alternate."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(reps):
        for name, run in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(run(*given))
            times[name].append(time.perf_counter() - start)
    return times


def main(arguments: list[str] | None = None) -> None:
    """Trains both and compares them.

    Raises:
        SystemExit: the losses part, or nothing is learnt.
    """
    parser = argparse.ArgumentParser(description="Trains a transformer by XLA and by fuse.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--reps", type=int, default=10, help="timed steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="the small model on a GPU, too")
    args = parser.parse_args(arguments)

    (device,) = jnp.zeros(()).devices()
    shape = LARGE if device.platform == "gpu" and not args.small else SMALL
    print(f"{shape}, on {device.device_kind} ({device.platform})")
    key = jax.random.key(args.seed)
    params = init(key, shape)
    optimizer, step = make_step(shape)
    fused = jax_tcgemm.fuse(step)  # the only change

    steps = {"jnp": jax.jit(step), "fuse": jax.jit(fused)}
    states: dict[str, Any] = dict.fromkeys(steps, (params, optimizer.init(params)))
    print(f"{'step':>5}  {'jnp':>8}  {'fuse':>8}")
    losses: dict[str, float] = {}
    first = 0.0
    for number, tokens in enumerate(batches(jax.random.key(args.seed + 1), shape, args.steps)):
        for name, run in steps.items():
            *state, loss = run(*states[name], tokens)
            states[name], losses[name] = tuple(state), float(loss)
        first = losses["jnp"] if number == 0 else first
        if number % 10 == 9 or number == args.steps - 1:
            print(f"{number + 1:5d}  {losses['jnp']:8.4f}  {losses['fuse']:8.4f}")
        if not abs(losses["fuse"] - losses["jnp"]) <= TOLERANCE * losses["jnp"] + 1e-3:
            raise SystemExit(f"FAILED: the losses of step {number + 1} part: {losses}")
    if not losses["fuse"] < 0.9 * first:
        raise SystemExit(f"FAILED: the loss is {losses['fuse']:.4f} after {first:.4f}")

    given = (params, optimizer.init(params), tokens)
    found = kernels(jax.make_jaxpr(fused)(*given).jaxpr)
    with_epilogue = sum(count for name, count in found.items() if "compiled" in name)
    print(f"{with_epilogue} of {found.total()} products have an epilogue")
    theirs, own = (statistics.median(each) for each in times_of(steps, given, args.reps).values())
    print(f"a step: jnp {theirs * 1e3:.2f} ms, fuse {own * 1e3:.2f} ms ({theirs / own:.2f})")
    print("OK: the same losses")


if __name__ == "__main__":
    main()
