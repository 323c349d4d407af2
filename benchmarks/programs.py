"""Steps of public models with random weights, using the libraries' own layers, unchanged.

The libraries do not know this package. ``models.py`` skips a program whose library is not
installed.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from typing import Any

import grouped_queries
import hugging_face
import jax
import jax.numpy as jnp
import numpy as np
import optax
from model_step import (
    BF16,
    FULL,
    Program,
    Sizes,
    filled,
    normal,
    tokens_of,
    training,
)

# --- Flax linen --------------------------------------------------------------------------------


def vit_train(sizes: Sizes, *, scanned: bool = False) -> Program:
    """Six layers of ViT base by linen; optionally ``scanned``, with rematerialization."""
    import flax.linen as nn

    heads = max(1, 12 // sizes.scale)
    width = 64 * heads

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, _: Any = None) -> tuple[jax.Array, None]:
            h = nn.LayerNorm(dtype=BF16)(x)
            x = x + nn.MultiHeadDotProductAttention(heads, dtype=BF16, qkv_features=width)(h, h)
            h = nn.Dense(4 * width, dtype=BF16)(nn.LayerNorm(dtype=BF16)(x))
            return x + nn.Dense(width, dtype=BF16)(nn.gelu(h)), None

    class Vit(nn.Module):
        @nn.compact
        def __call__(self, images: jax.Array) -> jax.Array:
            x = nn.Conv(width, (16, 16), (16, 16), dtype=BF16)(images)
            x = x.reshape(len(x), -1, width)
            if scanned:
                axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
                x, _ = nn.scan(nn.remat(Block), length=6, **axes)()(x, None)
            else:
                for _ in range(6):
                    x, _ = Block()(x)
            return nn.Dense(1000, dtype=BF16)(x.mean(1))

    model = Vit()
    images = normal((16 * sizes.sequences, 224, 224, 3) if sizes is FULL else (2, 32, 32, 3))
    parameters = filled(jax.eval_shape(model.init, jax.random.key(0), images))

    def loss(parameters: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        logits: Any = model.apply(parameters, images)
        wide = logits.astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(wide, labels).mean()

    return training(loss, parameters, images, tokens_of((len(images),), 1000))


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
    parameters = filled(types, BF16)

    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        y = x
        for block in eqx.combine(parameters, rest):
            y = jax.vmap(block)(y)
        return jnp.mean((y - x).astype(jnp.float32) ** 2)

    return training(loss, parameters, normal((sizes.sequences, sizes.tokens, width)))


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
    x = normal((sizes.sequences, sizes.tokens, width))
    parameters = filled(jax.eval_shape(model.init, jax.random.key(0), x), BF16)

    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        return jnp.mean((model.apply(parameters, x) - x).astype(jnp.float32) ** 2)

    return training(loss, parameters, x)


def experts_train(sizes: Sizes) -> Program:
    """Two layers of eight experts, two for each token, by ``lax.ragged_dot``."""
    width, hidden, experts = 1024 // sizes.scale, 4096 // sizes.scale, 8

    def layer(parameters: Any, x: jax.Array) -> jax.Array:
        weights, chosen = jax.lax.top_k(jax.nn.softmax(x @ parameters["router"]), 2)
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=experts)
        rows = x[order // 2]
        gate, up = (jax.lax.ragged_dot(rows, parameters[name], sizes) for name in ("gate", "up"))
        y = jax.lax.ragged_dot(jax.nn.silu(gate) * up, parameters["down"], sizes)
        y = y[jnp.argsort(order)].reshape(*chosen.shape, width)
        # XLA would add up the gradient of (y * weights[..., None]).sum(1) in bfloat16.
        return x + jnp.einsum("tkw,tk->tw", y, weights)

    shapes = {
        "router": (width, experts),
        "gate": (experts, width, hidden),
        "up": (experts, width, hidden),
        "down": (experts, hidden, width),
    }
    types = {name: jax.ShapeDtypeStruct(shape, BF16) for name, shape in shapes.items()}

    def loss(layers: Any, x: jax.Array) -> jax.Array:
        y = x
        for parameters in layers:
            y = layer(parameters, y)
        return jnp.mean((y - x).astype(jnp.float32) ** 2)

    x = normal((sizes.sequences * sizes.tokens, width))
    return training(loss, [filled(types) for _ in range(2)], x)


def keras_train(sizes: Sizes) -> Program:
    """Four layers by Keras in mixed bfloat16, with its own training step and AdamW."""
    os.environ.setdefault("KERAS_BACKEND", "jax")  # Keras reads this when it is imported
    import keras  # pyright: ignore[reportMissingImports]

    heads = max(1, 16 // sizes.scale)
    width, vocabulary = 64 * heads, 32768 // sizes.scale
    keras.config.set_dtype_policy("mixed_bfloat16")
    tokens = keras.Input((sizes.tokens,), dtype="int32")
    x = keras.layers.Embedding(vocabulary, width)(tokens)
    for _ in range(4):
        h = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(heads, 64)(h, h, use_causal_mask=True)
        h = keras.layers.Dense(4 * width, activation="gelu")(keras.layers.LayerNormalization()(x))
        x = x + keras.layers.Dense(width)(h)
    logits = keras.layers.Dense(vocabulary, dtype="bfloat16")(x)
    model = keras.Model(tokens, logits)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(), loss)
    model.optimizer.build(model.trainable_variables)
    # Groups the optimizer's variables by kind, since moments are compared together.
    of_optimizer = model.optimizer.variables
    kinds = [each.path.rpartition("_")[2] for each in of_optimizer]
    groups = [[i for i, kind in enumerate(kinds) if kind == name] for name in sorted({*kinds})]
    order = [*itertools.chain(*groups)]
    others = model.non_trainable_variables, model.metrics_variables
    kept = model.trainable_variables, *([of_optimizer[i] for i in group] for group in groups)
    state = tuple([each.value for each in one] for one in (*kept, *others))

    def step(state: Any, inputs: jax.Array, labels: jax.Array) -> tuple[Any, Any]:
        trainable, *moments, fixed, metrics = state
        own = [each for _, each in sorted(zip(order, itertools.chain(*moments), strict=True))]
        logs, state = model.train_step((trainable, fixed, own, metrics), (inputs, labels))
        trainable, fixed, own, metrics = state
        moments = [[own[i] for i in group] for group in groups]
        return (trainable, *moments, fixed, metrics), logs["loss"]

    rng = np.random.default_rng(0)
    drawn = rng.integers(0, vocabulary, (sizes.sequences, sizes.tokens + 1), np.int32)
    return Program(step, state, (jnp.asarray(drawn[:, :-1]), jnp.asarray(drawn[:, 1:])))


PROGRAMS: dict[str, Callable[[Sizes], Program]] = {
    "gpt2 train": hugging_face.gpt2_train,
    "bert train": hugging_face.bert_train,
    "llama train": hugging_face.llama_train,
    "llama prefill": hugging_face.llama_prefill,
    "llama decode 16": hugging_face.llama_decode,
    "llama decode 1": functools.partial(hugging_face.llama_decode, batch=1),
    "mistral decode 16": hugging_face.mistral_decode,
    "vit train": vit_train,
    "vit scanned train": functools.partial(vit_train, scanned=True),
    "gqa train": grouped_queries.train,
    "gqa decode 16": grouped_queries.decode,
    "gqa decode 1": functools.partial(grouped_queries.decode, batch=1),
    "llama3 decode 16": functools.partial(grouped_queries.decode, shape=grouped_queries.LLAMA_3),
    "equinox train": equinox_train,
    "haiku train": haiku_train,
    "keras train": keras_train,
    "unet train": hugging_face.unet_train,
    "experts train": experts_train,
}
