"""Generates tokens with a decoder written without this package, plain and under ``fuse``.

The decoder is plain ``jax.numpy`` in bfloat16: layers by ``lax.scan``, RMSNorm, attention in which
several heads of the queries share one of the cache, and a gated layer. A step reads one token of
each sequence, updates the caches in place and returns logits. Under ``jax_tcgemm.fuse``, kernels
read the caches and the weights of each layer in place. The script prints how each kind of product
is computed, the largest difference of the logits, and the tokens a second of both. It fails if the
logits differ by more than rounding.

Run it with ``python examples/fused_decode.py``; ``--help`` lists the arguments.
"""

import argparse
import dataclasses
import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

import jax_tcgemm

# The largest accepted difference of the logits, relative to their norm.
TOLERANCE = 2**-5

Arrays = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Extents of the model and of its caches.

    Attributes:
        layers: the number of layers.
        width: features of a token.
        hidden: features within the gated layer.
        heads: heads of the queries.
        shared: heads of the queries that share a head of the cache.
        entries: tokens for which a cache has room.
        vocabulary: the number of different tokens.
    """

    layers: int
    width: int
    hidden: int
    heads: int
    shared: int
    entries: int
    vocabulary: int

    @property
    def head(self) -> int:
        return self.width // self.heads


SMALL = Shape(layers=2, width=64, hidden=128, heads=4, shared=2, entries=32, vocabulary=128)
LARGE = Shape(6, width=2048, hidden=5504, heads=16, shared=4, entries=1024, vocabulary=32000)


def init(key: jax.Array, shape: Shape) -> Arrays:
    """Returns the weights; those of layers have a leading dimension of layers."""
    width, cached = shape.width, shape.width // shape.shared
    matrices = {
        **dict.fromkeys(("q", "o"), (width, width)),
        **dict.fromkeys(("k", "v"), (width, cached)),
        **dict.fromkeys(("gate", "up"), (width, shape.hidden)),
        "down": (shape.hidden, width),
    }
    keys = iter(jax.random.split(key, len(matrices) + 1))

    def drawn(*extents: int) -> jax.Array:
        scale = extents[-2] ** -0.5
        return jax.random.normal(next(keys), extents, jnp.bfloat16) * jnp.bfloat16(scale)

    weights = {name: drawn(shape.layers, *extents) for name, extents in matrices.items()}
    return weights | {"embedding": drawn(shape.vocabulary, width) * 64}


def empty_caches(shape: Shape, batch: int) -> tuple[jax.Array, jax.Array]:
    """Returns the caches of keys and values, ``(layers, batch, entries, heads, features)``."""
    heads = shape.heads // shape.shared
    extents = (shape.layers, batch, shape.entries, heads, shape.head)
    return jnp.zeros(extents, jnp.bfloat16), jnp.zeros(extents, jnp.bfloat16)


def rms_norm(x: jax.Array) -> jax.Array:
    """Returns the rows of ``x``, each scaled to mean square 1."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def step(
    caches: Any, weights: Arrays, tokens: jax.Array, place: jax.Array, shape: Shape
) -> tuple[Any, jax.Array]:
    """Reads one token of each sequence.

    Args:
        caches: as ``empty_caches`` returns them.
        weights: as ``init`` returns them.
        tokens: int32, of shape ``(batch,)``.
        place: the number of tokens before these.
        shape: the extents of the model.

    Returns:
        The caches with one more entry, and the logits, ``(batch, vocabulary)``.
    """
    batch = len(tokens)
    length = jnp.full((batch,), place + 1)

    def layer(x: jax.Array, each: Any) -> tuple[jax.Array, Any]:
        w, keys, values = each
        h = rms_norm(x)
        q, k, v = ((h @ w[name]).reshape(batch, 1, -1, shape.head) for name in ("q", "k", "v"))
        keys, values = (
            jax.lax.dynamic_update_slice(old, new, (0, place, 0, 0))
            for old, new in ((keys, k), (values, v))
        )
        mixed = jax.nn.dot_product_attention(q, keys, values, key_value_seq_lengths=length)
        x = x + mixed.reshape(batch, -1) @ w["o"]
        h = rms_norm(x)
        return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], (keys, values)

    stacked = {name: w for name, w in weights.items() if name != "embedding"}
    x = weights["embedding"][tokens]
    x, caches = jax.lax.scan(layer, x, (stacked, *caches))
    return caches, (rms_norm(x) @ weights["embedding"].T).astype(jnp.float32)


def main(arguments: list[str] | None = None) -> None:
    """Generates the same tokens by both and compares them.

    Raises:
        SystemExit: the logits differ.
    """
    parser = argparse.ArgumentParser(description="Generates tokens by XLA and by fuse.")
    parser.add_argument("--batch", type=int, default=16, help="sequences")
    parser.add_argument("--tokens", type=int, default=24, help="of each sequence")
    parser.add_argument("--small", action="store_true", help="the small model on a GPU, too")
    args = parser.parse_args(arguments)

    (device,) = jnp.zeros(()).devices()
    shape = LARGE if device.platform == "gpu" and not args.small else SMALL
    if not 2 <= args.tokens <= shape.entries:
        parser.error(f"--tokens {args.tokens}; accepted: 2 to {shape.entries}")
    print(f"{shape}, {args.batch} sequences, on {device.device_kind} ({device.platform})")
    weights = init(jax.random.key(0), shape)
    plain = functools.partial(step, shape=shape)
    fused = jax_tcgemm.fuse(plain)  # the only change
    steps = {"jnp": jax.jit(plain, donate_argnums=0), "fuse": jax.jit(fused, donate_argnums=0)}

    tokens = jnp.zeros(args.batch, jnp.int32)
    place = jnp.int32(0)
    print(fused.report(empty_caches(shape, args.batch), weights, tokens, place))
    caches = {name: empty_caches(shape, args.batch) for name in steps}
    times: dict[str, list[float]] = {name: [] for name in steps}
    worst = 0.0
    for number in range(args.tokens):
        place = jnp.int32(shape.entries - args.tokens + number)
        logits: Arrays = {}
        for name, run in steps.items():
            start = time.perf_counter()
            caches[name], logits[name] = jax.block_until_ready(
                run(caches[name], weights, tokens, place)
            )
            times[name].append(time.perf_counter() - start)
        distance = jnp.linalg.norm(logits["fuse"] - logits["jnp"])
        worst = max(worst, float(distance / jnp.linalg.norm(logits["jnp"])))
        tokens = jnp.argmax(logits["jnp"], -1).astype(jnp.int32)  # both read the same tokens
    if not worst <= TOLERANCE:
        raise SystemExit(f"FAILED: the logits differ by {worst:.4f} of their norm")
    theirs, own = (args.batch / statistics.median(times[name][1:]) for name in steps)
    print(f"tokens a second: jnp {theirs:.0f}, fuse {own:.0f} ({own / theirs:.2f})")
    print(f"OK: the logits differ by {worst:.4f} of their norm")


if __name__ == "__main__":
    main()
