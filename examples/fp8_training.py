"""Trains a small transformer decoder in float8 beside bfloat16, with each recipe for scales.

``jax_tcgemm.fp8_dot`` computes the projections of attention and the two layers after it: operands
in float8_e4m3fn, cotangents in float8_e5m2, sums and master weights in float32. Embedding,
attention, norms and logits are the same bfloat16 code for all models. A text is one of several
Markov chains, and its first token says which, so that the layers have something to learn. The
script prints the losses side by side, then the time of a step. It fails if a float8 model does not
learn what the bfloat16 model does.

Run it with ``python examples/fp8_training.py``; ``--help`` lists the arguments. The defaults are
small on a CPU.
"""

import argparse
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_tcgemm import Fp8State, fp8_dot
from jax_tcgemm.tools.benchmarking import time_chains
from jax_tcgemm.tools.chain import Chain, compile_chain, default_device

RECIPES = ("current", "block", "delayed")
CHAINS = 4
# In a chain, one of a few tokens follows each token; the first of them does most of the time.
FOLLOWERS = (0.7, 0.15, 0.1, 0.05)
# The largest accepted difference between the losses of the last steps, relative to what was learnt:
# values keep 3 bits after the first, gradients 2.
TOLERANCE = 0.05
LAST = 5

Params = dict[str, Any]
Dense = Callable[[jax.Array, jax.Array, Any], jax.Array]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Extents of the model and of a batch. Block scales need widths that are multiples of 128."""

    batch: int
    tokens: int
    width: int
    hidden: int
    heads: int
    layers: int
    vocabulary: int


SMALL = Shape(batch=8, tokens=64, width=128, hidden=256, heads=4, layers=2, vocabulary=32)
LARGE = Shape(batch=8, tokens=1024, width=4096, hidden=14336, heads=32, layers=2, vocabulary=512)


def in_bf16(x: jax.Array, w: jax.Array, state: None) -> jax.Array:
    """Computes a product by XLA, with weights rounded to bfloat16."""
    del state
    return x @ w.astype(x.dtype)


def in_fp8(recipe: str) -> Dense:
    """Returns a float8 product, which quantizes the master weights directly."""
    return lambda x, w, state: fp8_dot(x, w, recipe=recipe, state=state)


def init(key: jax.Array, shape: Shape) -> Params:
    """Returns float32 weights: normal numbers that keep the scale of their factors."""
    matrices = {
        "qkv": (shape.width, 3 * shape.width),
        "out": (shape.width, shape.width),
        "up": (shape.width, shape.hidden),
        "down": (shape.hidden, shape.width),
    }
    first, last, *keys = jax.random.split(key, 2 + shape.layers * len(matrices))
    drawn = iter(keys)
    layers = [
        {name: jax.random.normal(next(drawn), s) * s[0] ** -0.5 for name, s in matrices.items()}
        for _ in range(shape.layers)
    ]
    table = shape.vocabulary, shape.width
    return {
        "embedding": jax.random.normal(first, table),
        "layers": layers,
        "logits": jax.random.normal(last, table[::-1]) * shape.width**-0.5,
    }


def norm(x: jax.Array) -> jax.Array:
    """Divides each token by its root mean square, in float32."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)).astype(x.dtype)


def block(dense: Dense, layer: Params, states: Params, x: jax.Array, heads: int) -> jax.Array:
    """Applies attention and two layers; ``x`` is ``(batch, tokens, width)`` in bfloat16."""
    qkv = dense(norm(x), layer["qkv"], states["qkv"])
    q, k, v = jnp.split(qkv.reshape(*x.shape[:2], 3 * heads, -1), 3, axis=2)
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
    x = x + dense(mixed, layer["out"], states["out"])
    hidden = jax.nn.gelu(dense(norm(x), layer["up"], states["up"]))
    return x + dense(hidden, layer["down"], states["down"])


def loss(
    dense: Dense, heads: int, params: Params, states: list[Params], text: jax.Array
) -> jax.Array:
    """Returns the mean cross entropy of each token, given those before it."""
    x = params["embedding"].astype(jnp.bfloat16)[text[:, :-1]]
    for layer, own in zip(params["layers"], states, strict=True):
        x = block(dense, layer, own, x, heads)
    logits = jnp.matmul(
        norm(x), params["logits"].astype(x.dtype), preferred_element_type=jnp.float32
    )
    likelihoods = jnp.take_along_axis(jax.nn.log_softmax(logits), text[:, 1:, None], -1)
    return -jnp.mean(likelihoods)


def make_step(dense: Dense, heads: int, rate: float) -> Callable:
    """Returns a step of Adam, whose state includes the scales of delayed scaling."""
    grad = jax.value_and_grad(functools.partial(loss, dense, heads), (0, 1))

    def step(state, text: jax.Array):
        params, states, first, second, count = state
        # The gradients of the scales' states are their new values.
        value, (slope, states) = grad(params, states, text)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, slope)
        second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g**2, second, slope)
        count = count + 1

        def update(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            return p - rate * (m / (1 - 0.9**count)) / (jnp.sqrt(v / (1 - 0.99**count)) + 1e-10)

        params = jax.tree.map(update, params, first, second)
        return (params, states, first, second, count), value

    return step


def start(params: Params, recipe: str) -> tuple:
    """Returns the initial state of a training."""
    create = Fp8State.create if recipe == "delayed" else lambda: None
    states = [{name: create() for name in layer} for layer in params["layers"]]
    zeros = jax.tree.map(jnp.zeros_like, params)
    return params, states, zeros, zeros, jnp.zeros(())


def draw_followers(key: jax.Array, shape: Shape) -> jax.Array:
    """Draws the possible followers of each token: ``(chains, vocabulary, followers)``."""
    order = jax.vmap(lambda key: jax.random.permutation(key, shape.vocabulary - CHAINS))
    drawn = order(jax.random.split(key, CHAINS * shape.vocabulary))[:, : len(FOLLOWERS)] + CHAINS
    return drawn.reshape(CHAINS, shape.vocabulary, len(FOLLOWERS))


def entropy(shape: Shape) -> float:
    """Returns the entropy of a token: a text's second token is any, later ones follow its chain."""
    followers = -sum(share * math.log(share) for share in FOLLOWERS)
    return (math.log(shape.vocabulary - CHAINS) + (shape.tokens - 1) * followers) / shape.tokens


@functools.partial(jax.jit, static_argnums=1)
def texts(key: jax.Array, shape: Shape, followers: jax.Array) -> jax.Array:
    """Draws ``(batch, tokens + 1)`` tokens: the number of a chain, then the chain's tokens.

    Args:
        key: the key of the random numbers.
        shape: the shape of the batch.
        followers: the result of ``draw_followers``.
    """
    keys = jax.random.split(key, 3)
    chain = jax.random.randint(keys[0], (shape.batch,), 0, CHAINS)
    token = jax.random.randint(keys[1], (shape.batch,), CHAINS, shape.vocabulary)
    logits = jnp.log(jnp.asarray(FOLLOWERS))
    choices = jax.random.categorical(keys[2], logits, shape=(shape.tokens - 1, shape.batch))

    def follow(token, choice):
        following = followers[chain, token, choice]
        return following, following

    _, rest = jax.lax.scan(follow, token, choices)
    return jnp.concatenate([chain[None], token[None], rest]).T


def train(chain: Chain, batches: list[jax.Array]) -> list[float]:
    """Returns the loss before each step, from the state that the step was compiled for."""
    ((state, _),) = chain.argument_sets
    curve = []
    for text in batches:
        ((state, value),) = chain.compiled([(state, text)])
        curve.append(float(value))
    return curve


def compare(curves: dict[str, list[float]]) -> None:
    """Prints the losses side by side.

    Raises:
        SystemExit: a model did not learn what the bfloat16 model did.
    """
    print("  step" + "".join(f"{name:>10}" for name in curves))
    length = len(curves["bf16"])
    for i in [*range(0, length - 1, max(1, length // 8)), length - 1]:
        print(f"{i:6}" + "".join(f"{curve[i]:10.4f}" for curve in curves.values()))
    ends = {name: sum(curve[-LAST:]) / LAST for name, curve in curves.items()}
    learnt = curves["bf16"][0] - ends["bf16"]
    if not learnt > 0:
        raise SystemExit(f"FAILED: the loss in bf16 did not fall below {curves['bf16'][0]}")
    for name, end in ends.items():
        if not abs(end - ends["bf16"]) <= TOLERANCE * learnt:
            raise SystemExit(f"FAILED: loss {end:.4f} by {name}, {ends['bf16']:.4f} in bf16")


def main(arguments: list[str] | None = None) -> None:
    """Trains all models, and compares them.

    Raises:
        SystemExit: a model did not learn what the bfloat16 model did.
    """
    device = default_device()
    is_gpu = device.platform == "gpu"
    default = LARGE if is_gpu else SMALL
    parser = argparse.ArgumentParser(description="A transformer in float8 and in bfloat16.")
    for field in dataclasses.fields(Shape):
        parser.add_argument(f"--{field.name}", type=int, default=getattr(default, field.name))
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    parser.add_argument("--steps", type=int, default=200 if is_gpu else 80)
    parser.add_argument("--rate", type=float, default=3e-4 if is_gpu else 3e-3)
    parser.add_argument(
        "--reps", type=int, default=20 if is_gpu else 4, help="samples of each step's time"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)

    shape = Shape(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Shape)})
    weights, table, *keys = jax.random.split(jax.random.key(args.seed), 2 + args.steps)
    followers = draw_followers(table, shape)
    batches = [texts(key, shape, followers) for key in keys]
    print(f"{shape}, on {device.device_kind} ({device.platform})")
    print(f"least loss to be expected: {entropy(shape):.4f}")

    products: dict[str, Dense] = {"bf16": in_bf16} | {name: in_fp8(name) for name in args.recipes}
    steps = {name: make_step(dense, shape.heads, args.rate) for name, dense in products.items()}
    params = init(weights, shape)
    chains = {
        name: compile_chain(step, [(start(params, name), batches[0])])
        for name, step in steps.items()
    }
    compare({name: train(chain, batches) for name, chain in chains.items()})
    times = time_chains(chains, reps=args.reps)
    print(f"a step, ms ({times['bf16'].method} time):")
    print(" " * 6 + "".join(f"{timing.median * 1e3:10.3f}" for timing in times.values()))
    print("OK: float8 learns what bfloat16 does")


if __name__ == "__main__":
    main()
