"""Steps of Hugging Face models: transformers 4 and diffusers, in Flax."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from model_step import (
    BF16,
    FULL,
    Program,
    Sizes,
    filled,
    next_token_loss,
    normal,
    tokens_of,
    training,
)


def _hugging_face(model: Any, batch: tuple[int, int], dtype: Any = None, **options: Any) -> Any:
    """Returns the variables of a transformers model."""
    ids = jnp.zeros(batch, jnp.int32)
    init = functools.partial(model.module.init, return_dict=False, **options)
    types = jax.eval_shape(init, jax.random.key(0), ids, jnp.ones_like(ids), ids)
    return {name: filled(value, dtype) for name, value in types.items()}


def _positions(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the mask and the positions that the models need."""
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
    model = FlaxGPT2LMHeadModel(config, dtype=BF16, _do_init=False)

    def loss(parameters: Any, tokens: jax.Array) -> jax.Array:
        logits = model.module.apply({"params": parameters}, tokens, *_positions(tokens)).logits
        return next_token_loss(logits, tokens)

    tokens = tokens_of((sizes.sequences, sizes.tokens), config.vocab_size)
    return training(loss, _hugging_face(model, (1, 8))["params"], tokens)


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
    model = FlaxBertForMaskedLM(config, dtype=BF16, _do_init=False)
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

    tokens = tokens_of((sizes.sequences * 2, min(512, sizes.tokens)), config.vocab_size)
    return training(loss, filled(types["params"]), tokens)


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
    return FlaxLlamaForCausalLM(config, dtype=BF16, _do_init=False)


def llama_train(sizes: Sizes) -> Program:
    """Three Llama layers of width 2048, parameters in float32."""
    model = _llama(sizes)

    def loss(parameters: Any, tokens: jax.Array) -> jax.Array:
        logits = model.module.apply({"params": parameters}, tokens, *_positions(tokens)).logits
        return next_token_loss(logits, tokens)

    tokens = tokens_of((sizes.sequences, sizes.tokens), model.config.vocab_size)
    return training(loss, _hugging_face(model, (1, 8))["params"], tokens)


def llama_prefill(sizes: Sizes) -> Program:
    """The same layers in bfloat16: the logits after the last token."""
    model = _llama(sizes)
    parameters = _hugging_face(model, (1, 8), BF16)["params"]

    def step(state: Any, parameters: Any, tokens: jax.Array) -> tuple[Any, Any]:
        logits = model.module.apply({"params": parameters}, tokens, *_positions(tokens)).logits
        return state, logits[:, -1]

    tokens = tokens_of((sizes.sequences, sizes.tokens), model.config.vocab_size)
    return Program(step, (), (parameters, tokens))


def _decode(model: Any, sizes: Sizes, batch: int) -> Program:
    """Generates one more token, with a cache that is nearly full."""
    variables = _hugging_face(model, (batch, sizes.tokens), BF16, init_cache=True)
    mask = jnp.ones((batch, sizes.tokens), jnp.int32)
    at = sizes.tokens - 8

    def placed(x: jax.Array) -> jax.Array:
        return jnp.full_like(x, at) if jnp.issubdtype(x.dtype, jnp.integer) else normal(x.shape)

    def step(cache: Any, parameters: Any, tokens: jax.Array) -> tuple[Any, Any]:
        positions = jnp.full((batch, 1), at, jnp.int32)
        out, changed = model.module.apply(
            {"params": parameters, "cache": cache}, tokens, mask, positions, mutable=["cache"]
        )
        return changed["cache"], jnp.argmax(out.logits[:, -1], -1)

    cache = jax.tree.map(placed, variables["cache"])
    return Program(step, cache, (variables["params"], tokens_of((batch, 1), 1000)))


def llama_decode(sizes: Sizes, batch: int = 16) -> Program:
    """The same layers: generates one more token, with a cache."""
    return _decode(_llama(sizes), sizes, batch)


def mistral_decode(sizes: Sizes, batch: int = 16) -> Program:
    """Two layers of Mistral 7B, in which four heads of the queries share one of the cache."""
    from transformers import FlaxMistralForCausalLM, MistralConfig  # pyright: ignore[reportMissingImports]

    heads = max(4, 32 // sizes.scale)
    config = MistralConfig(
        num_hidden_layers=2,
        hidden_size=128 * heads,
        intermediate_size=14336 // sizes.scale,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        vocab_size=32000 // sizes.scale,
        max_position_embeddings=1024,
        sliding_window=1024,
    )
    return _decode(FlaxMistralForCausalLM(config, dtype=BF16, _do_init=False), sizes, batch)


def unet_train(sizes: Sizes) -> Program:
    """A diffusion UNet of diffusers with two resolutions and cross-attention."""
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
        dtype=BF16,
    )
    batch = 2 * sizes.sequences
    types = jax.eval_shape(model.init_weights, jax.random.key(0))
    noisy, words = normal((batch, 4, side, side)), normal((batch, 77, context))

    def loss(parameters: Any, noisy: jax.Array, words: jax.Array) -> jax.Array:
        times = jnp.full((batch,), 10, jnp.int32)
        predicted = model.apply({"params": parameters}, noisy, times, words).sample
        return jnp.mean((predicted - noisy).astype(jnp.float32) ** 2)

    return training(loss, filled(types), noisy, words)
