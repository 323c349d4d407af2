"""A training step of a small model in each framework: a hidden layer, batch norm, dropout, Adam.

If a framework has no dropout or batch norm of its own (plain pytrees, for example), this file
writes them out. A layer before batch norm has no bias, because the bias gradient would be rounding
error alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from keras_steps import keras_fit, keras_stateless
from training_step import (
    CLASSES,
    DROPOUT,
    FEATURES,
    HIDDEN,
    RATE,
    ROWS,
    Framework,
    batch,
    cross_entropy,
    functional,
    itself,
)


def plain() -> Framework:
    """Returns a framework whose state is a dictionary that contains a tuple."""
    adam = optax.adam(RATE)

    def layer(key, extents):
        weight = jax.random.normal(key, extents) * extents[0] ** -0.5
        return {"w": weight, "b": jnp.zeros(extents[1])}

    def start(dtype):
        keys = jax.random.split(jax.random.key(0), 2)
        params = (layer(keys[0], (FEATURES, HIDDEN)), layer(keys[1], (HIDDEN, CLASSES)))
        del params[0]["b"]
        params = jax.tree.map(lambda x: x.astype(dtype), params)
        mean = jnp.zeros(HIDDEN)
        return {
            "params": params,
            "opt": adam.init(params),
            "stats": {"mean": mean},
            "key": jax.random.key(1),
            "count": jnp.int32(0),
        }

    def loss_of(params, key, x, y):
        first, second = params
        z = x.astype(first["w"].dtype) @ first["w"]
        mean = z.mean(0)
        kept = jax.random.bernoulli(key, 1 - DROPOUT, z.shape)
        h = jnp.where(kept, jax.nn.gelu(z - mean) / (1 - DROPOUT), 0)
        return cross_entropy(h @ second["w"] + second["b"], y), mean

    def step(state, x, y):
        key, own = jax.random.split(state["key"])
        (loss, mean), grads = jax.value_and_grad(loss_of, has_aux=True)(state["params"], own, x, y)
        updates, opt = adam.update(grads, state["opt"], state["params"])
        return {
            "params": optax.apply_updates(state["params"], updates),
            "opt": opt,
            "stats": {"mean": 0.9 * state["stats"]["mean"] + 0.1 * mean.astype(jnp.float32)},
            "key": key,
            "count": state["count"] + 1,
        }, loss

    return Framework(start, step, jax.jit, functional, itself)


def _nnx_parts() -> tuple[Any, Callable[[Any], Any], Callable[..., Any]]:
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, dtype, rngs):
            options = {"dtype": dtype, "rngs": rngs}
            self.hidden = nnx.Linear(FEATURES, HIDDEN, use_bias=False, **options)
            self.norm = nnx.BatchNorm(HIDDEN, momentum=0.9, **options)
            self.dropout = nnx.Dropout(DROPOUT, rngs=rngs)
            self.out = nnx.Linear(HIDDEN, CLASSES, **options)

        def __call__(self, x):
            return self.out(self.dropout(nnx.gelu(self.norm(self.hidden(x)))))

    def start(dtype):
        model = Net(dtype, nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(RATE), wrt=nnx.Param)

    def step(model, optimizer, x, y):
        loss, grads = nnx.value_and_grad(lambda model: cross_entropy(model(x), y))(model)
        optimizer.update(model, grads)
        return loss

    return nnx, start, step


def flax_nnx() -> Framework:
    """Returns Flax NNX, which updates model and optimizer in place."""
    nnx, start, step = _nnx_parts()

    def run(compiled, state, x, y):
        return state, compiled(*state, x, y)

    return Framework(start, step, nnx.jit, run, nnx.state)


def flax_nnx_functional() -> Framework:
    """Returns Flax NNX, split and merged around `jax.jit`."""
    nnx, start, step = _nnx_parts()

    def split(dtype):
        nonlocal graph
        graph, state = nnx.split(start(dtype))
        return state

    def split_step(state, x, y):
        parts = nnx.merge(graph, state)
        loss = step(*parts, x, y)
        return nnx.state(parts), loss

    graph: Any = None
    return Framework(split, split_step, jax.jit, functional, itself)


def flax_linen() -> Framework:
    """Returns Flax Linen with a `TrainState`, whose functions are no leaves, and statistics."""
    from flax import linen
    from flax.training import train_state

    class Net(linen.Module):
        dtype: Any

        @linen.compact
        def __call__(self, x):
            x = linen.Dense(HIDDEN, use_bias=False, dtype=self.dtype)(x)
            x = linen.BatchNorm(use_running_average=False, momentum=0.9, dtype=self.dtype)(x)
            x = linen.Dropout(DROPOUT, deterministic=False)(linen.gelu(x))
            return linen.Dense(CLASSES, dtype=self.dtype)(x)

    class State(train_state.TrainState):
        stats: Any

    def start(dtype):
        net = Net(dtype)
        keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        made = net.init(keys, batch()[0])
        return State.create(
            apply_fn=net.apply,
            params=made["params"],
            tx=optax.adam(RATE),
            stats=made["batch_stats"],
        )

    def step(state, x, y):
        rngs = {"dropout": jax.random.fold_in(jax.random.key(1), state.step)}

        def loss_of(params):
            variables = {"params": params, "batch_stats": state.stats}
            logits, new = state.apply_fn(variables, x, rngs=rngs, mutable=["batch_stats"])
            return cross_entropy(logits, y), new["batch_stats"]

        (loss, stats), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads).replace(stats=stats), loss

    return Framework(start, step, jax.jit, functional, itself)


def equinox() -> Framework:
    """Returns Equinox: modules that hold functions and Python numbers among their leaves."""
    import equinox as eqx

    class Net(eqx.Module):
        hidden: eqx.nn.Linear
        norm: eqx.nn.BatchNorm
        dropout: eqx.nn.Dropout
        out: eqx.nn.Linear
        activation: Callable  # a leaf
        passes: int  # another leaf

        def __init__(self, dtype, key):
            keys = jax.random.split(key, 2)
            options = {"dtype": dtype, "use_bias": False}
            self.hidden = eqx.nn.Linear(FEATURES, HIDDEN, key=keys[0], **options)
            self.norm = eqx.nn.BatchNorm(HIDDEN, axis_name="batch", mode="batch", dtype=dtype)
            self.dropout = eqx.nn.Dropout(DROPOUT)
            self.out = eqx.nn.Linear(HIDDEN, CLASSES, key=keys[1], dtype=dtype)
            self.activation = jax.nn.gelu
            self.passes = 1

        def __call__(self, x, state, key):
            x = self.hidden(x.astype(self.hidden.weight.dtype))
            x, state = self.norm(x, state)
            for _ in range(self.passes):
                x = self.dropout(self.activation(x), key=key)
            return self.out(x), state

    adam = optax.adam(RATE)

    def start(dtype):
        model, stats = eqx.nn.make_with_state(Net)(dtype, jax.random.key(0))
        return model, stats, adam.init(eqx.filter(model, eqx.is_inexact_array)), jax.random.key(1)

    def loss_of(model, stats, keys, x, y):
        apply = jax.vmap(model, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))
        logits, stats = apply(x, stats, keys)
        return cross_entropy(logits, y), stats

    def step(state, x, y):
        model, stats, opt, key = state
        key, own = jax.random.split(key)
        take = eqx.filter_value_and_grad(loss_of, has_aux=True)
        (loss, stats), grads = take(model, stats, jax.random.split(own, ROWS), x, y)
        updates, opt = adam.update(grads, opt, eqx.filter(model, eqx.is_inexact_array))
        return (eqx.apply_updates(model, updates), stats, opt, key), loss

    def observed(state):
        return eqx.filter(state, eqx.is_array)

    return Framework(start, step, eqx.filter_jit, functional, observed)


def haiku() -> Framework:
    """Returns Haiku: separate dictionaries for parameters and statistics."""
    import haiku as hk

    def forward(x, dtype):
        x = hk.Linear(HIDDEN, with_bias=False)(x.astype(dtype))
        x = hk.BatchNorm(True, True, decay_rate=0.9)(x, is_training=True)
        x = hk.dropout(hk.next_rng_key(), DROPOUT, jax.nn.gelu(x))
        return hk.Linear(CLASSES)(x.astype(dtype))

    transformed = hk.transform_with_state(forward)
    adam = optax.adam(RATE)

    def start(dtype):
        params, stats = transformed.init(jax.random.key(0), batch()[0].astype(dtype), dtype)
        return params, stats, adam.init(params), jax.random.key(1)

    def step(state, x, y):
        params, stats, opt, key = state
        key, own = jax.random.split(key)

        def loss_of(params):
            dtype = params["linear"]["w"].dtype
            logits, new = transformed.apply(params, stats, own, x, dtype)
            return cross_entropy(logits, y), new

        (loss, stats), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, opt = adam.update(grads, opt, params)
        return (optax.apply_updates(params, updates), stats, opt, key), loss

    return Framework(start, step, jax.jit, functional, itself)


FRAMEWORKS: dict[str, Callable[[], Framework]] = {
    "plain": plain,
    "flax.nnx": flax_nnx,
    "flax.nnx functional": flax_nnx_functional,
    "flax.linen": flax_linen,
    "equinox": equinox,
    "haiku": haiku,
    "keras stateless": keras_stateless,
    "keras fit": keras_fit,
}
