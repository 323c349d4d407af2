"""Steps of decoders with grouped queries, of the layers of Flax NNX."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from model_step import BF16, Program, Sizes, filled, next_token_loss, normal, tokens_of, training


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The extents of a decoder with grouped queries.

    Attributes:
        width: features of a token.
        hidden: features within an mlp.
        heads: heads of the queries.
        cached: heads of the keys and values.
        wide: features of a head.
        layers: the number of layers.
    """

    width: int
    hidden: int
    heads: int
    cached: int
    wide: int
    layers: int


GEMMA = Decoder(width=1152, hidden=6912, heads=4, cached=1, wide=256, layers=4)
LLAMA_3 = Decoder(width=4096, hidden=14336, heads=32, cached=8, wide=128, layers=2)


def _model(sizes: Sizes, shape: Decoder) -> Any:
    """A decoder with grouped queries, of NNX layers."""
    from flax import nnx

    width, hidden, wide = (x // sizes.scale for x in (shape.width, shape.hidden, shape.wide))
    heads, cached = shape.heads, shape.cached
    named = functools.partial(dict, dtype=BF16)

    class Attention(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            into = functools.partial(nnx.Einsum, "bsd,dhe->bshe", rngs=rngs, **named())
            self.q, self.kv = into((width, heads, wide)), into((width, cached, wide))
            self.v = into((width, cached, wide))
            back = (heads, wide, width)
            self.out = nnx.Einsum("bshe,hed->bsd", back, rngs=rngs, **named())

        def __call__(self, x: jax.Array, cache: Any, at: int) -> tuple[jax.Array, Any]:
            q, k, v = self.q(x), self.kv(x), self.v(x)
            if cache is not None:
                k, v = (
                    jax.lax.dynamic_update_slice(old, new, (0, at, 0, 0))
                    for old, new in zip(cache, (k, v), strict=True)
                )
            out = jax.nn.dot_product_attention(q, k, v, is_causal=cache is None)
            return self.out(out), (k, v)

    class Block(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.norms = nnx.List([nnx.RMSNorm(width, rngs=rngs, **named()) for _ in range(2)])
            self.attention = Attention(rngs)
            linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs, **named())
            self.gate, self.up = linear(width, hidden), linear(width, hidden)
            self.down = linear(hidden, width)

        def __call__(self, x: jax.Array, cache: Any, at: int) -> tuple[jax.Array, Any]:
            y, kept = self.attention(self.norms[0](x), cache, at)
            x = x + y
            h = self.norms[1](x)
            return x + self.down(nnx.gelu(self.gate(h)) * self.up(h)), kept

    class Model(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.embed = nnx.Embed(32768 // sizes.scale, width, rngs=rngs, **named())
            self.blocks = nnx.List([Block(rngs) for _ in range(shape.layers)])
            self.norm = nnx.RMSNorm(width, rngs=rngs, **named())

        def __call__(self, tokens: jax.Array, caches: Any = None, at: int = 0) -> Any:
            x, kept = self.embed(tokens), []
            for i, block in enumerate(self.blocks):
                x, own = block(x, None if caches is None else caches[i], at)
                kept.append(own)
            return self.embed.attend(self.norm(x)), kept

    graph, state = nnx.split(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))
    return graph, filled(state), 32768 // sizes.scale


def train(sizes: Sizes) -> Program:
    """Four layers with the shape of Gemma 3 1B, by NNX, with float32 parameters."""
    from flax import nnx

    graph, state, vocabulary = _model(sizes, GEMMA)

    def loss(state: Any, tokens: jax.Array) -> jax.Array:
        return next_token_loss(nnx.merge(graph, state)(tokens)[0], tokens)

    return training(loss, state, tokens_of((sizes.sequences, sizes.tokens), vocabulary))


def decode(sizes: Sizes, batch: int = 16, shape: Decoder = GEMMA) -> Program:
    """Such layers in bfloat16: generates one more token, with a cache."""
    from flax import nnx

    graph, state, vocabulary = _model(sizes, shape)
    parameters = filled(state, BF16)
    entries = (batch, sizes.tokens, shape.cached, shape.wide // sizes.scale)
    caches = [(normal(entries),) * 2 for _ in range(shape.layers)]
    caches = jax.tree.map(jnp.copy, caches)  # each copy is donated
    at = sizes.tokens - 8

    def step(caches: Any, parameters: Any, tokens: jax.Array) -> tuple[Any, Any]:
        logits, caches = nnx.merge(graph, parameters)(tokens, caches, at)
        return caches, jnp.argmax(logits[:, -1], -1)

    return Program(step, caches, (parameters, tokens_of((batch, 1), vocabulary)))
