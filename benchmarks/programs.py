"""Steps of public models with random weights, by the libraries' own layers, unchanged.

None knows of this package. A program whose library is not installed is left out.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

_BF16 = jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large the models are; those of ``TINY`` are for tests.

    Attributes:
        scale: divides widths and vocabularies.
        tokens: of a sequence, and entries of a cache.
        sequences: of a batch.
    """

    scale: int = 1
    tokens: int = 1024
    sequences: int = 4


FULL, TINY = Sizes(), Sizes(scale=16, tokens=32, sequences=2)


@dataclasses.dataclass(frozen=True)
class Program:
    """A step.

    Attributes:
        step: of the state and the inputs; returns the state, which is donated, and results.
        state: parameters and what an optimizer keeps, or a cache.
        inputs: the rest.
    """

    step: Callable[..., tuple[Any, Any]]
    state: Any
    inputs: tuple[Any, ...]


@functools.cache
def _pool() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(2**21 - 9).astype(np.float32)


def _filled(types: Any, dtype: Any = None) -> Any:
    """Returns arrays of these types: small normal numbers, ones for vectors, zeros for integers."""

    def one(x: Any) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.zeros(x.shape, x.dtype)
        scale = 0.02 * np.resize(_pool(), x.shape) if len(x.shape) > 1 else np.ones(x.shape)
        return jnp.asarray(scale.astype(x.dtype if dtype is None else dtype))

    return jax.tree.map(one, types)


def _tokens(shape: tuple[int, ...], vocabulary: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).integers(0, vocabulary, shape), jnp.int32)


def _normal(shape: tuple[int, ...], dtype: Any = _BF16) -> jax.Array:
    return jnp.asarray(np.resize(_pool(), shape).astype(dtype))


def _next_token_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    wide = logits[:, :-1].astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(wide, tokens[:, 1:]).mean()


def _training(loss: Callable[..., jax.Array], parameters: Any, *inputs: Any) -> Program:
    """Returns the step of AdamW on a loss of the parameters and the inputs."""
    optimizer = optax.adamw(1e-4)

    def step(state: Any, *inputs: Any) -> tuple[Any, Any]:
        parameters, kept = state
        value, gradients = jax.value_and_grad(loss)(parameters, *inputs)
        updates, kept = optimizer.update(gradients, kept, parameters)
        return (optax.apply_updates(parameters, updates), kept), value

    return Program(step, (parameters, jax.jit(optimizer.init)(parameters)), inputs)


# --- Hugging Face transformers 4, Flax ---------------------------------------------------------


def _hugging_face(model: Any, batch: tuple[int, int], dtype: Any = None, **options: Any) -> Any:
    """Returns the variables of a model of transformers."""
    ids = jnp.zeros(batch, jnp.int32)
    init = functools.partial(model.module.init, return_dict=False, **options)
    types = jax.eval_shape(init, jax.random.key(0), ids, jnp.ones_like(ids), ids)
    return {name: _filled(value, dtype) for name, value in types.items()}


def _positions(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the mask and the positions that the models ask for."""
    return jnp.ones_like(tokens), jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)


def gpt2_train(sizes: Sizes) -> Program:
    """Four of the 48 layers of GPT-2 XL, with its vocabulary."""
    from transformers import FlaxGPT2LMHeadModel, GPT2Config  # pyright: ignore[reportMissingImports]

    heads = max(1, 25 // sizes.scale)
    config = GPT2Config(
        n_layer=4,
        n_embd=64 * heads,
        n_head=heads,
        vocab_size=50257 // sizes.scale,
        n_positions=sizes.tokens,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    )
    model = FlaxGPT2LMHeadModel(config, dtype=_BF16, _do_init=False)

    def loss(parameters: Any, tokens: jax.Array) -> jax.Array:
        logits = model.module.apply({"params": parameters}, tokens, *_positions(tokens)).logits
        return _next_token_loss(logits, tokens)

    tokens = _tokens((sizes.sequences, sizes.tokens), config.vocab_size)
    return _training(loss, _hugging_face(model, (1, 8))["params"], tokens)


def bert_train(sizes: Sizes) -> Program:
    """Four layers of BERT large, which predict every token."""
    from transformers import BertConfig, FlaxBertForMaskedLM  # pyright: ignore[reportMissingImports]

    heads = max(1, 16 // sizes.scale)
    config = BertConfig(
        num_hidden_layers=4,
        hidden_size=64 * heads,
        num_attention_heads=heads,
        intermediate_size=256 * heads,
        vocab_size=30522 // sizes.scale,
        max_position_embeddings=sizes.tokens,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = FlaxBertForMaskedLM(config, dtype=_BF16, _do_init=False)
    ids = jnp.zeros((1, 8), jnp.int32)
    types = jax.eval_shape(
        functools.partial(model.module.init, return_dict=False),
        *(jax.random.key(0), ids, jnp.ones_like(ids), ids, ids, None),
    )

    def loss(parameters: Any, tokens: jax.Array) -> jax.Array:
        mask, positions = _positions(tokens)
        kinds = jnp.zeros_like(tokens)
        variables = {"params": parameters}
        logits = model.module.apply(variables, tokens, mask, kinds, positions, None).logits
        wide = logits.astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(wide, tokens).mean()

    tokens = _tokens((sizes.sequences * 2, min(512, sizes.tokens)), config.vocab_size)
    return _training(loss, _filled(types["params"]), tokens)


def _llama(sizes: Sizes) -> Any:
    from transformers import FlaxLlamaForCausalLM, LlamaConfig  # pyright: ignore[reportMissingImports]

    heads = max(1, 16 // sizes.scale)
    config = LlamaConfig(
        num_hidden_layers=3,
        hidden_size=128 * heads,
        intermediate_size=5504 // sizes.scale,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=32000 // sizes.scale,
        max_position_embeddings=1024,
    )
    return FlaxLlamaForCausalLM(config, dtype=_BF16, _do_init=False)


def llama_train(sizes: Sizes) -> Program:
    """Three Llama layers of width 2048, parameters in float32."""
    model = _llama(sizes)

    def loss(parameters: Any, tokens: jax.Array) -> jax.Array:
        logits = model.module.apply({"params": parameters}, tokens, *_positions(tokens)).logits
        return _next_token_loss(logits, tokens)

    tokens = _tokens((sizes.sequences, sizes.tokens), model.config.vocab_size)
    return _training(loss, _hugging_face(model, (1, 8))["params"], tokens)


def llama_prefill(sizes: Sizes) -> Program:
    """The same in bfloat16: the logits after the last token."""
    model = _llama(sizes)
    parameters = _hugging_face(model, (1, 8), _BF16)["params"]

    def step(state: Any, parameters: Any, tokens: jax.Array) -> tuple[Any, Any]:
        logits = model.module.apply({"params": parameters}, tokens, *_positions(tokens)).logits
        return state, logits[:, -1]

    tokens = _tokens((sizes.sequences, sizes.tokens), model.config.vocab_size)
    return Program(step, (), (parameters, tokens))


def llama_decode(sizes: Sizes, batch: int = 16) -> Program:
    """The same: one token more, with a cache."""
    model = _llama(sizes)
    variables = _hugging_face(model, (batch, sizes.tokens), _BF16, init_cache=True)
    mask = jnp.ones((batch, sizes.tokens), jnp.int32)
    at = sizes.tokens - 8

    def placed(x: jax.Array) -> jax.Array:
        return jnp.full_like(x, at) if jnp.issubdtype(x.dtype, jnp.integer) else _normal(x.shape)

    def step(cache: Any, parameters: Any, tokens: jax.Array) -> tuple[Any, Any]:
        positions = jnp.full((batch, 1), at, jnp.int32)
        out, changed = model.module.apply(
            {"params": parameters, "cache": cache}, tokens, mask, positions, mutable=["cache"]
        )
        return changed["cache"], jnp.argmax(out.logits[:, -1], -1)

    cache = jax.tree.map(placed, variables["cache"])
    return Program(step, cache, (variables["params"], _tokens((batch, 1), 1000)))


# --- Flax linen and NNX ------------------------------------------------------------------------


def vit_train(sizes: Sizes, *, scanned: bool = False) -> Program:
    """Six layers of ViT base by linen; ``scanned``, and computed again on the way back."""
    import flax.linen as nn

    heads = max(1, 12 // sizes.scale)
    width = 64 * heads

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, _: Any = None) -> tuple[jax.Array, None]:
            h = nn.LayerNorm(dtype=_BF16)(x)
            x = x + nn.MultiHeadDotProductAttention(heads, dtype=_BF16, qkv_features=width)(h, h)
            h = nn.Dense(4 * width, dtype=_BF16)(nn.LayerNorm(dtype=_BF16)(x))
            return x + nn.Dense(width, dtype=_BF16)(nn.gelu(h)), None

    class Vit(nn.Module):
        @nn.compact
        def __call__(self, images: jax.Array) -> jax.Array:
            x = nn.Conv(width, (16, 16), (16, 16), dtype=_BF16)(images)
            x = x.reshape(len(x), -1, width)
            if scanned:
                axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
                x, _ = nn.scan(nn.remat(Block), length=6, **axes)()(x, None)
            else:
                for _ in range(6):
                    x, _ = Block()(x)
            return nn.Dense(1000, dtype=_BF16)(x.mean(1))

    model = Vit()
    images = _normal((16 * sizes.sequences, 224, 224, 3) if sizes is FULL else (2, 32, 32, 3))
    parameters = _filled(jax.eval_shape(model.init, jax.random.key(0), images))

    def loss(parameters: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        logits: Any = model.apply(parameters, images)
        wide = logits.astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(wide, labels).mean()

    return _training(loss, parameters, images, _tokens((len(images),), 1000))


def _grouped_queries(sizes: Sizes) -> Any:
    """A decoder with grouped queries, as Gemma 3 1B has them, of NNX's layers."""
    from flax import nnx

    width, hidden, wide = 1152 // sizes.scale, 6912 // sizes.scale, 256 // sizes.scale
    heads = 4
    named = functools.partial(dict, dtype=_BF16)

    class Attention(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            into = functools.partial(nnx.Einsum, "bsd,dhe->bshe", rngs=rngs, **named())
            self.q, self.kv = into((width, heads, wide)), into((width, 1, wide))
            self.v = into((width, 1, wide))
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

    class Decoder(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.embed = nnx.Embed(32768 // sizes.scale, width, rngs=rngs, **named())
            self.blocks = nnx.List([Block(rngs) for _ in range(4)])
            self.norm = nnx.RMSNorm(width, rngs=rngs, **named())

        def __call__(self, tokens: jax.Array, caches: Any = None, at: int = 0) -> Any:
            x, kept = self.embed(tokens), []
            for i, block in enumerate(self.blocks):
                x, own = block(x, None if caches is None else caches[i], at)
                kept.append(own)
            return self.embed.attend(self.norm(x)), kept

    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(nnx.Rngs(0))))
    return graph, _filled(state), (wide, 32768 // sizes.scale)


def gqa_train(sizes: Sizes) -> Program:
    """Four layers of the shape of Gemma 3 1B, by NNX, parameters in float32."""
    from flax import nnx

    graph, state, (_, vocabulary) = _grouped_queries(sizes)

    def loss(state: Any, tokens: jax.Array) -> jax.Array:
        return _next_token_loss(nnx.merge(graph, state)(tokens)[0], tokens)

    return _training(loss, state, _tokens((sizes.sequences, sizes.tokens), vocabulary))


def gqa_decode(sizes: Sizes, batch: int = 16) -> Program:
    """The same in bfloat16: one token more, with a cache."""
    from flax import nnx

    graph, state, (wide, vocabulary) = _grouped_queries(sizes)
    parameters = _filled(state, _BF16)
    caches = [(_normal((batch, sizes.tokens, 1, wide)),) * 2 for _ in range(4)]
    caches = jax.tree.map(jnp.copy, caches)  # each donated
    at = sizes.tokens - 8

    def step(caches: Any, parameters: Any, tokens: jax.Array) -> tuple[Any, Any]:
        logits, caches = nnx.merge(graph, parameters)(tokens, caches, at)
        return caches, jnp.argmax(logits[:, -1], -1)

    return Program(step, caches, (parameters, _tokens((batch, 1), vocabulary)))


# --- Other libraries ---------------------------------------------------------------------------


def equinox_train(sizes: Sizes) -> Program:
    """Four layers by Equinox, as its documentation writes a transformer, in bfloat16."""
    import equinox as eqx

    heads = max(1, 16 // sizes.scale)
    width = 64 * heads

    class Block(eqx.Module):
        attention: Any
        norms: Any
        up: Any
        down: Any

        def __init__(self, key: jax.Array) -> None:
            keys = jax.random.split(key, 3)
            self.attention = eqx.nn.MultiheadAttention(heads, width, key=keys[0])
            self.norms = [eqx.nn.LayerNorm(width) for _ in range(2)]
            self.up = eqx.nn.Linear(width, 4 * width, key=keys[1])
            self.down = eqx.nn.Linear(4 * width, width, key=keys[2])

        def __call__(self, x: jax.Array) -> jax.Array:
            h = jax.vmap(self.norms[0])(x)
            x = x + self.attention(h, h, h)
            h = jax.vmap(self.up)(jax.vmap(self.norms[1])(x))
            return x + jax.vmap(self.down)(jax.nn.gelu(h))

    made = eqx.filter_eval_shape(
        lambda: [Block(key) for key in jax.random.split(jax.random.key(0), 4)]
    )
    types, rest = eqx.partition(made, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    parameters = _filled(types, _BF16)

    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        y = x
        for block in eqx.combine(parameters, rest):
            y = jax.vmap(block)(y)
        return jnp.mean((y - x).astype(jnp.float32) ** 2)

    return _training(loss, parameters, _normal((sizes.sequences, sizes.tokens, width)))


def haiku_train(sizes: Sizes) -> Program:
    """Four layers by dm-haiku, in bfloat16."""
    import haiku as hk  # pyright: ignore[reportMissingImports]

    heads = max(1, 16 // sizes.scale)
    width = 64 * heads

    def forward(x: jax.Array) -> jax.Array:
        draw = hk.initializers.VarianceScaling(1.0)
        for _ in range(4):
            h = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
            x = x + hk.MultiHeadAttention(heads, 64, w_init=draw, model_size=width)(h, h, h)
            h = hk.Linear(4 * width)(hk.LayerNorm(-1, create_scale=True, create_offset=True)(x))
            x = x + hk.Linear(width)(jax.nn.gelu(h))
        return x

    model = hk.without_apply_rng(hk.transform(forward))
    x = _normal((sizes.sequences, sizes.tokens, width))
    parameters = _filled(jax.eval_shape(model.init, jax.random.key(0), x), _BF16)

    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        return jnp.mean((model.apply(parameters, x) - x).astype(jnp.float32) ** 2)

    return _training(loss, parameters, x)


def unet_train(sizes: Sizes) -> Program:
    """A diffusion UNet of diffusers, of two resolutions with cross-attention."""
    from diffusers import FlaxUNet2DConditionModel  # pyright: ignore[reportMissingImports]

    width = 320 // sizes.scale
    side, context = (64, 768) if sizes is FULL else (16, 64)
    model = FlaxUNet2DConditionModel(
        sample_size=side,
        block_out_channels=(width - width % 32 or 32, 2 * width - 2 * width % 32 or 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=context,
        attention_head_dim=8,
        dtype=_BF16,
    )
    batch = 2 * sizes.sequences
    types = jax.eval_shape(model.init_weights, jax.random.key(0))
    noisy, words = _normal((batch, 4, side, side)), _normal((batch, 77, context))

    def loss(parameters: Any, noisy: jax.Array, words: jax.Array) -> jax.Array:
        times = jnp.full((batch,), 10, jnp.int32)
        predicted = model.apply({"params": parameters}, noisy, times, words).sample
        return jnp.mean((predicted - noisy).astype(jnp.float32) ** 2)

    return _training(loss, _filled(types), noisy, words)


def experts_train(sizes: Sizes) -> Program:
    """Two layers of eight experts, each token by two of them, by ``lax.ragged_dot``."""
    width, hidden, experts = 1024 // sizes.scale, 4096 // sizes.scale, 8

    def layer(parameters: Any, x: jax.Array) -> jax.Array:
        weights, chosen = jax.lax.top_k(jax.nn.softmax(x @ parameters["router"]), 2)
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=experts)
        rows = x[order // 2]
        gate, up = (jax.lax.ragged_dot(rows, parameters[name], sizes) for name in ("gate", "up"))
        y = jax.lax.ragged_dot(jax.nn.silu(gate) * up, parameters["down"], sizes)
        y = y[jnp.argsort(order)].reshape(*chosen.shape, width)
        return x + (y * weights[..., None]).sum(1)

    shapes = {
        "router": (width, experts),
        "gate": (experts, width, hidden),
        "up": (experts, width, hidden),
        "down": (experts, hidden, width),
    }
    types = {name: jax.ShapeDtypeStruct(shape, _BF16) for name, shape in shapes.items()}

    def loss(layers: Any, x: jax.Array) -> jax.Array:
        y = x
        for parameters in layers:
            y = layer(parameters, y)
        return jnp.mean((y - x).astype(jnp.float32) ** 2)

    x = _normal((sizes.sequences * sizes.tokens, width))
    return _training(loss, [_filled(types) for _ in range(2)], x)


PROGRAMS: dict[str, Callable[[Sizes], Program]] = {
    "gpt2 train": gpt2_train,
    "bert train": bert_train,
    "llama train": llama_train,
    "llama prefill": llama_prefill,
    "llama decode 16": llama_decode,
    "llama decode 1": functools.partial(llama_decode, batch=1),
    "vit train": vit_train,
    "vit scanned train": functools.partial(vit_train, scanned=True),
    "gqa train": gqa_train,
    "gqa decode 16": gqa_decode,
    "gqa decode 1": functools.partial(gqa_decode, batch=1),
    "equinox train": equinox_train,
    "haiku train": haiku_train,
    "unet train": unet_train,
    "experts train": experts_train,
}
