"""Decodes with a Llama-like decoder whose weights have 16, 8 and 4 bits.

The weights are random. The script quantizes them to int8 (a scale for each column) and to int4 (a
scale for each group of consecutive inputs), and lays them out for the kernels. One more decoder
keeps int4 arrays and dequantizes them in ``jnp``; ``fuse`` packs them before the loop. All decoders
see the same tokens, drawn in advance, one at a time, in one ``scan`` over the tokens. The cache of
keys and values is full, as late in a long text.

For each decoder the script prints the tokens a second, the memory and the difference of its logits
from those of the bfloat16 decoder whose products XLA computes. It fails if a difference is too
large.

Weights are arguments of ``jit``. A weight that a compiled function closes over is a constant, which
XLA may dequantize when it compiles.

Run it with ``python examples/quantized_decode.py --batch 16``; ``--help`` lists the arguments.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tcgemm

# The largest accepted difference of the logits, relative to their norm.
TOLERANCES = {"XLA": 0.0, "bf16": 0.05, "int8": 0.08, "int4": 0.5, "int4 in jnp": 0.5}
THETA = 500_000.0  # Llama 3's base of the rotary angles


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a decoder."""

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    cache: int
    vocabulary: int
    group: int

    @property
    def head(self) -> int:
        return self.width // self.heads

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """The shapes of the matrices of a layer, inputs first."""
        return {
            "qkv": (self.width, (self.heads + 2 * self.kv_heads) * self.head),
            "out": (self.heads * self.head, self.width),
            "gate": (self.width, self.hidden),
            "up": (self.width, self.hidden),
            "down": (self.hidden, self.width),
        }


@functools.partial(jax.jit, static_argnames="sizes")
def drawn(key: jax.Array, sizes: Sizes) -> dict[str, Any]:
    """Returns random weights in bfloat16."""

    def matrix(key, shape):
        return jax.random.normal(key, shape, jnp.bfloat16) * shape[0] ** -0.5

    embedding_key, head_key, *keys = jax.random.split(key, 2 + sizes.layers)
    layers = []
    for layer_key in keys:
        own = jax.random.split(layer_key, len(sizes.shapes))
        pairs = zip(sizes.shapes.items(), own, strict=True)
        layers.append({name: matrix(each, shape) for (name, shape), each in pairs})
    return {
        "embedding": jax.random.normal(
            embedding_key, (sizes.vocabulary, sizes.width), jnp.bfloat16
        ),
        "layers": layers,
        "head": matrix(head_key, (sizes.width, sizes.vocabulary)),
    }


def quantized(weights: dict[str, Any], dtype: Any, group: int) -> dict[str, Any]:
    """Returns the weights with packed matrices; the embedding, which is no factor, stays."""
    tile = (group, 1) if jnp.dtype(dtype) == jnp.int4 else (-1, 1)

    @jax.jit
    def packed(w):
        return jax_tcgemm.pack(jax_tcgemm.quantize(w, dtype, tile=tile, scale_dtype=jnp.bfloat16))

    matrices = {name: jax.tree.map(packed, weights[name]) for name in ("layers", "head")}
    return weights | matrices


def stored(weights: dict[str, Any], group: int) -> dict[str, Any]:
    """Returns the weights with int4 values and scales in the place of matrices."""

    @jax.jit
    def parts(w):
        q = jax_tcgemm.quantize(w, jnp.int4, tile=(group, 1), scale_dtype=jnp.bfloat16)
        return q.qvalue, q.scale

    matrices = {name: jax.tree.map(parts, weights[name]) for name in ("layers", "head")}
    return weights | matrices


def normalized(x: jax.Array) -> jax.Array:
    """Divides rows by their root mean square."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)).astype(x.dtype)


def rotated(x: jax.Array, position: jax.Array) -> jax.Array:
    """Turns pairs of the last axis by angles that grow with the position."""
    half = x.shape[-1] // 2
    angles = position * THETA ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, -1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, -1).astype(x.dtype)


def attention(
    qkv: jax.Array, cache: tuple[jax.Array, jax.Array], position: jax.Array, sizes: Sizes
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Attends to the cache and adds one position to it.

    Args:
        qkv: ``(batch, (heads + 2 * kv_heads) * head)``.
        cache: keys and values, each ``(batch, kv_heads, cache, head)``.
        position: the position of the new keys and values.
        sizes: the sizes.

    Returns:
        ``(batch, heads * head)``, and the cache with the new position.
    """
    batch, own = len(qkv), sizes.heads // sizes.kv_heads
    ends = sizes.heads, sizes.heads + sizes.kv_heads
    q, k, v = jnp.split(qkv.reshape(batch, -1, sizes.head), ends, 1)
    q = rotated(q, position).reshape(batch, sizes.kv_heads, own, sizes.head)
    new = rotated(k, position), v
    keys, values = (
        jax.lax.dynamic_update_slice(old, x[:, :, None], (0, 0, position, 0))
        for old, x in zip(cache, new, strict=True)
    )
    scores = jnp.einsum("bgrd,bgtd->bgrt", q, keys, preferred_element_type=jnp.float32)
    seen = jnp.arange(sizes.cache) <= position
    shares = jax.nn.softmax(jnp.where(seen, scores * sizes.head**-0.5, -jnp.inf))
    mixed = jnp.einsum("bgrt,bgtd->bgrd", shares.astype(q.dtype), values)
    return mixed.reshape(batch, -1), (keys, values)


def product_by_xla(x: jax.Array, w: jax.Array, residual: jax.Array | None = None) -> jax.Array:
    """Computes a product, and adds to it, in jnp."""
    return x @ w if residual is None else x @ w + residual


def gated_by_xla(x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Computes the two products of a gated layer in jnp."""
    return jax.nn.silu(x @ gate) * (x @ up)


def gated_by_kernels(x: jax.Array, gate: Any, up: Any) -> jax.Array:
    """Computes them by ``gated_gemm``."""
    return jax_tcgemm.gated_gemm(x, gate, up, activation="silu")


def restored(w: tuple[jax.Array, jax.Array], dtype: Any) -> jax.Array:
    """Dequantizes a stored weight in jnp."""
    values, scale = w
    groups = values.reshape(len(scale), -1, values.shape[1]).astype(dtype)
    return (groups * scale[:, None]).reshape(values.shape)


def product_of_stored(x: jax.Array, w: Any, residual: jax.Array | None = None) -> jax.Array:
    """Computes a product with a stored weight in jnp."""
    return product_by_xla(x, restored(w, x.dtype), residual)


def gated_of_stored(x: jax.Array, gate: Any, up: Any) -> jax.Array:
    """Computes a gated layer with stored weights in jnp."""
    return gated_by_xla(x, restored(gate, x.dtype), restored(up, x.dtype))


PRODUCTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "XLA": (product_by_xla, gated_by_xla),
    "kernels": (jax_tcgemm.gemm, gated_by_kernels),
    "fuse": (product_of_stored, gated_of_stored),
}


def decode(
    weights: dict[str, Any], tokens: jax.Array, caches: Any, *, sizes: Sizes, products: str
) -> tuple[Any, jax.Array]:
    """Decodes tokens one after another at the end of the cache.

    Args:
        weights: the weights, in arrays, packed or stored.
        tokens: ``(steps, batch)``.
        caches: keys and values of each layer.
        sizes: the sizes.
        products: a name in ``PRODUCTS``.

    Returns:
        The caches, and the logits ``(steps, batch, vocabulary)`` in float32.
    """
    product, gated = PRODUCTS[products]
    first = sizes.cache - len(tokens)

    def step(caches, inputs):
        position, token = inputs
        x = weights["embedding"][token]  # (batch, width)
        new = []
        for layer, cache in zip(weights["layers"], caches, strict=True):
            qkv = product(normalized(x), layer["qkv"])
            mixed, cache = attention(qkv, cache, position, sizes)
            x = product(mixed, layer["out"], residual=x)
            hidden = gated(normalized(x), layer["gate"], layer["up"])
            x = product(hidden, layer["down"], residual=x)
            new.append(cache)
        return new, product(normalized(x), weights["head"]).astype(jnp.float32)

    return jax.lax.scan(step, caches, (first + jnp.arange(len(tokens)), tokens))


def measured(
    weights: Any, tokens: jax.Array, sizes: Sizes, products: str, reps: int
) -> tuple[float, float, np.ndarray]:
    """Returns the tokens a second, the memory in bytes and the logits of one decoder."""
    shape = (tokens.shape[1], sizes.kv_heads, sizes.cache, sizes.head)

    def new_caches():
        keys = jax.random.split(jax.random.key(1), 2 * sizes.layers)
        drawn = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]
        return list(zip(drawn[::2], drawn[1::2], strict=True))

    caches = new_caches()
    run = functools.partial(decode, sizes=sizes, products=products)
    if products == "fuse":
        run = jax_tcgemm.fuse(run)  # its products are written in jnp alone
    compiled = jax.jit(run, donate_argnums=2).lower(weights, tokens, caches).compile()
    memory = 0
    if (stats := compiled.memory_analysis()) is not None:
        memory = stats.argument_size_in_bytes + stats.temp_size_in_bytes
        memory += stats.output_size_in_bytes - stats.alias_size_in_bytes
    caches, logits = jax.block_until_ready(compiled(weights, tokens, caches))
    found = np.asarray(logits)
    fastest = float("inf")
    for _ in range(reps):
        start = time.perf_counter()
        caches, logits = jax.block_until_ready(compiled(weights, tokens, caches))
        fastest = min(fastest, time.perf_counter() - start)
    return tokens.size / fastest, memory, found


def main(arguments: list[str] | None = None) -> None:
    """Decodes with each kind of weights and compares.

    Raises:
        SystemExit: the logits of a decoder differ too much.
    """
    parser = argparse.ArgumentParser(
        description="Decodes with weights in 16, 8 and 4 bits by jax_tcgemm, and in 16 by XLA."
    )
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32, help="length of the scan")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=14336)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--cache", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--group", type=int, default=128, help="inputs that share a scale in int4")
    parser.add_argument("--reps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--forms", nargs="+", choices=TOLERANCES, default=list(TOLERANCES))
    args = parser.parse_args(arguments)

    names = [field.name for field in dataclasses.fields(Sizes)]
    sizes = Sizes(**{name: getattr(args, name) for name in names})
    weights = drawn(jax.random.key(args.seed), sizes)
    rng = np.random.default_rng(args.seed)
    tokens = jnp.asarray(rng.integers(0, args.vocabulary, (args.tokens, args.batch)), jnp.int32)

    (device,) = tokens.devices()
    print(f"batch {args.batch}, on {device.device_kind} ({device.platform})")
    print(f"{'weights':>11}  {'tokens/s':>10}  {'memory':>10}  {'logits differ by':>16}")
    reference = None
    for form in dict.fromkeys(["XLA", *args.forms]):
        products = "XLA" if form == "XLA" else "fuse" if form == "int4 in jnp" else "kernels"
        if form in ("XLA", "bf16"):
            own = weights
        elif products == "fuse":
            own = stored(weights, args.group)
        else:
            own = quantized(weights, jnp.dtype(form), args.group)
        rate, memory, logits = measured(own, tokens, sizes, products, args.reps)
        reference = logits if reference is None else reference
        difference = np.linalg.norm(logits - reference) / np.linalg.norm(reference)
        print(f"{form:>11}  {rate:10.1f}  {memory / 1e6:7.1f} MB  {difference:16.2e}")
        if not difference <= TOLERANCES[form]:
            raise SystemExit(f"FAILED: the logits of {form} differ by {difference:.2e}")
    print("OK: the logits are those of bfloat16, within the rounding of the weights")


if __name__ == "__main__":
    main()
