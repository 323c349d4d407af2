"""Compares a transformer block like Llama's with plain ``jnp``: gradients, time and memory.

One block computes every dense layer by this package: the projections by ``jax_tcgemm.gemm``, which
adds the residual stream in the kernel, and the SwiGLU layers by ``jax_tcgemm.gated_mlp``. The other
block is in plain ``jnp``. RMSNorm, rotary embedding and attention are the same code for both. The
script prints the loss, the error of every gradient against the same block in float32, the time of a
training step and the memory that it needs. It fails if an error is over twice that of the plain
block. With ``--tune`` it first measures the step's products, and times the tuned step beside the
others.

Run it with ``python examples/transformer_mlp.py``; ``--help`` lists the arguments. The defaults are
small on a CPU and one layer of Llama 3 8B on a GPU.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_tcgemm import gated_mlp, gemm, tune
from jax_tcgemm.tools.benchmarking import time_chains
from jax_tcgemm.tools.chain import compile_chain, default_device

LEARNING_RATE = 1e-3
# A gradient's error is at least one rounding of its largest element.
ROUNDING = {"bfloat16": 2**-8, "float32": 2**-11}

Params = dict[str, jax.Array]
State = tuple[Params, Params, Params]  # the weights, and Adam's moments in float32
Block = Callable[[Params, jax.Array, "Shape"], jax.Array]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Extents of the block."""

    batch: int
    tokens: int
    width: int
    hidden: int
    heads: int
    kv_heads: int

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.width // self.heads


SMALL = Shape(batch=2, tokens=32, width=128, hidden=352, heads=4, kv_heads=2)
LARGE = Shape(batch=4, tokens=2048, width=4096, hidden=14336, heads=32, kv_heads=8)


def init(key: jax.Array, shape: Shape, dtype: jnp.dtype) -> Params:
    """Returns the weights: normal numbers that keep the scale of their factors."""
    kv = 2 * shape.kv_heads * shape.head_width
    matrices = {
        "qkv": (shape.width, shape.width + kv),
        "out": (shape.width, shape.width),
        "gate": (shape.width, shape.hidden),
        "up": (shape.width, shape.hidden),
        "down": (shape.hidden, shape.width),
    }
    keys = jax.random.split(key, len(matrices))
    params = {
        name: (jax.random.normal(k, extents) * extents[0] ** -0.5).astype(dtype)
        for (name, extents), k in zip(matrices.items(), keys, strict=True)
    }
    ones = jnp.ones(shape.width, dtype)
    return {**params, "attention_norm": ones, "mlp_norm": ones}


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Divides each token by its root mean square, in float32."""
    wide = x.astype(jnp.float32)
    norm = jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)
    return (wide * norm * scale.astype(jnp.float32)).astype(x.dtype)


def rotary(x: jax.Array) -> jax.Array:
    """Rotates pairs of a head's elements by angles that grow with the position (RoFormer)."""
    _, tokens, _, width = x.shape
    rates = 10000.0 ** -(jnp.arange(0, width, 2) / width)
    angles = jnp.arange(tokens)[:, None] * rates  # (tokens, width / 2)
    cos, sin = (f(angles)[:, None, :] for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    pairs = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(pairs, -1).astype(x.dtype)


def attention(qkv: jax.Array, shape: Shape) -> jax.Array:
    """Applies causal attention with shared key/value heads; ``(batch, tokens, width)``."""
    batch, tokens, _ = qkv.shape
    heads = qkv.reshape(batch, tokens, -1, shape.head_width)
    turned, v = jnp.split(heads, [shape.heads + shape.kv_heads], axis=2)
    q, k = jnp.split(rotary(turned), [shape.heads], axis=2)
    out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return out.reshape(batch, tokens, shape.width)


def block_gemm(params: Params, x: jax.Array, shape: Shape) -> jax.Array:
    """Computes the block in four gemms, one of them gated; they add the residual stream."""
    normed = rms_norm(x, params["attention_norm"])
    mixed = attention(gemm(normed, params["qkv"]), shape)
    x = gemm(mixed, params["out"], residual=x)
    normed = rms_norm(x, params["mlp_norm"])
    return gated_mlp(normed, params["gate"], params["up"], params["down"], residual=x)


def block_jnp(params: Params, x: jax.Array, shape: Shape) -> jax.Array:
    """Computes the same block by XLA."""
    normed = rms_norm(x, params["attention_norm"])
    x = x + attention(normed @ params["qkv"], shape) @ params["out"]
    normed = rms_norm(x, params["mlp_norm"])
    gated = jax.nn.silu(normed @ params["gate"]) * (normed @ params["up"])
    return x + gated @ params["down"]


BLOCKS: dict[str, Block] = {"jax_tcgemm": block_gemm, "jnp": block_jnp}


def make_loss(block: Block, shape: Shape) -> Callable:
    """Returns the mean square distance of the block's output from a target."""

    def loss(params: Params, x: jax.Array, target: jax.Array) -> jax.Array:
        y = block(params, x, shape).astype(jnp.float32)
        return jnp.mean((y - target.astype(jnp.float32)) ** 2)

    return loss


def make_step(block: Block, shape: Shape) -> Callable:
    """Returns a step of Adam without bias correction, and the input's gradient."""
    grad = jax.value_and_grad(make_loss(block, shape), argnums=(0, 1))

    def step(state: State, x: jax.Array, target: jax.Array):
        params, first, second = state
        value, (slope, x_bar) = grad(params, x, target)
        slope = jax.tree.map(lambda g: g.astype(jnp.float32), slope)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, slope)
        second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, second, slope)

        def update(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            return (p - LEARNING_RATE * m / (jnp.sqrt(v) + 1e-8)).astype(p.dtype)

        return (jax.tree.map(update, params, first, second), first, second), value, x_bar

    return step


def peak_bytes(step: Callable, *args) -> int:
    """Returns the memory of the compiled step: arguments, results and temporaries."""
    stats = jax.jit(step, donate_argnums=0).lower(*args).compile().memory_analysis()
    if stats is None:
        raise SystemExit("FAILED: this platform does not say what memory a program needs")
    return (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        + stats.temp_size_in_bytes
        - stats.alias_size_in_bytes
    )


def errors(actual, exact) -> dict[str, float]:
    """Returns each gradient's largest error, relative to its largest element."""

    def error(x, y):
        return float(jnp.abs(x.astype(jnp.float32) - y).max() / jnp.abs(y).max())

    return jax.tree.map(error, actual, exact)


def compare(shape: Shape, dtype: jnp.dtype, args: tuple) -> None:
    """Prints losses and errors of both blocks.

    Raises:
        SystemExit: an error is over twice the plain block's.
    """
    with jax.default_matmul_precision("highest"):
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), args)
        exact_loss, exact = jax.jit(jax.value_and_grad(make_loss(block_jnp, shape), (0, 1)))(*wide)
    print(f"loss in float32: {exact_loss:.6f}")
    found = {}
    for name, block in BLOCKS.items():
        value, slope = jax.jit(jax.value_and_grad(make_loss(block, shape), (0, 1)))(*args)
        found[name] = {**errors(slope[0], exact[0]), "x": errors(slope[1], exact[1])}
        found[name]["loss"] = abs(float(value) / float(exact_loss) - 1)
    print(f"{'relative error of':>18}  {'jax_tcgemm':>10}  {'jnp':>10}")
    for quantity, plain in found["jnp"].items():
        ours = found["jax_tcgemm"][quantity]
        print(f"{quantity:>18}  {ours:10.2e}  {plain:10.2e}")
        if not ours <= 2 * plain + ROUNDING[dtype.name]:
            raise SystemExit(f"FAILED: the error of {quantity} is over twice the plain block's")


def measure(shape: Shape, args: tuple, reps: int, tuned: bool) -> None:
    """Prints the time and the memory of a training step by both blocks."""
    steps = {name: make_step(block, shape) for name, block in BLOCKS.items()}
    chains = {name: compile_chain(step, [args]) for name, step in steps.items()}
    if tuned:
        ours = steps["jax_tcgemm"]
        start = time.perf_counter()
        tunings = tune(ours, *args)
        print(f"tuned in {time.perf_counter() - start:.0f} s\n{tunings}")
        with tunings:  # while the step is compiled
            chains["tuned"] = compile_chain(ours, [args])
    timings = time_chains(chains, reps=reps)
    print(f"{'':>18}  " + "  ".join(f"{name:>10}" for name in timings))
    method = timings["jnp"].method
    print(
        f"{f'step, ms ({method})':>18}  "
        + "  ".join(f"{timing.median * 1e3:10.3f}" for timing in timings.values())
    )
    print(
        f"{'memory, MiB':>18}  "
        + "  ".join(f"{peak_bytes(step, *args) / 2**20:10.1f}" for step in steps.values())
    )


def main(arguments: list[str] | None = None) -> None:
    """Compares both blocks.

    Raises:
        SystemExit: an error is over twice the plain block's.
    """
    device = default_device()
    default = LARGE if device.platform == "gpu" else SMALL
    parser = argparse.ArgumentParser(description="A transformer block by jax_tcgemm and by jnp.")
    for field in dataclasses.fields(Shape):
        name = field.name.replace("_", "-")
        parser.add_argument(f"--{name}", type=int, default=getattr(default, field.name))
    parser.add_argument("--dtype", choices=sorted(ROUNDING), default="bfloat16")
    parser.add_argument("--reps", type=int, default=20, help="samples of each step's time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tune", action="store_true", help="also a step that was tuned (on a GPU)")
    args = parser.parse_args(arguments)

    shape = Shape(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Shape)})
    dtype = jnp.dtype(args.dtype)
    keys = jax.random.split(jax.random.key(args.seed), 3)
    extents = (shape.batch, shape.tokens, shape.width)
    x, target = (jax.random.normal(key, extents).astype(dtype) for key in keys[:2])
    operands = (init(keys[2], shape, dtype), x, target)
    print(f"{shape}, {dtype.name}, on {device.device_kind} ({device.platform})")
    compare(shape, dtype, operands)
    params, *data = operands
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    measure(shape, ((params, zeros, zeros), *data), args.reps, args.tune)
    print("OK: the same within rounding")


if __name__ == "__main__":
    main()
