"""Training steps of Keras on JAX, by its stateless API and by its own loop."""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from training_step import (
    CLASSES,
    DROPOUT,
    FEATURES,
    HIDDEN,
    RATE,
    ROWS,
    Framework,
    cross_entropy,
    functional,
    itself,
)

# Keras reads this when the functions import it.
os.environ.setdefault("KERAS_BACKEND", "jax")


def _keras_model(dtype: Any, model_class: Any = None) -> Any:
    import keras

    keras.utils.set_random_seed(0)
    policy = "mixed_bfloat16" if dtype == jnp.bfloat16 else "float32"
    inputs = keras.Input((FEATURES,))
    x = keras.layers.Dense(HIDDEN, use_bias=False, dtype=policy)(inputs)
    x = keras.layers.BatchNormalization(momentum=0.9, dtype=policy)(x)
    x = keras.layers.Activation("gelu", dtype=policy)(x)
    x = keras.layers.Dropout(DROPOUT, seed=3, dtype=policy)(x)
    outputs = keras.layers.Dense(CLASSES, dtype=policy)(x)
    return (model_class or keras.Model)(inputs, outputs)


def keras_stateless() -> Framework:
    """Returns Keras's stateless API: variables as lists of arrays, `jax.jit`."""
    import keras

    model: Any = None
    optimizer: Any = None

    def start(dtype):
        nonlocal model, optimizer
        model = _keras_model(dtype)
        optimizer = keras.optimizers.Adam(RATE)
        optimizer.build(model.trainable_variables)
        lists = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
        return tuple([variable.value for variable in own] for own in lists)

    def loss_of(trainable, others, x, y):
        logits, others = model.stateless_call(trainable, others, x, training=True)
        return cross_entropy(logits, y), others

    def step(state, x, y):
        trainable, others, opt = state
        take = jax.value_and_grad(loss_of, has_aux=True)
        (loss, others), grads = take(trainable, others, x, y)
        trainable, opt = optimizer.stateless_apply(opt, grads, trainable)
        return (trainable, others, opt), loss

    return Framework(start, step, jax.jit, functional, itself)


def keras_fit() -> Framework:
    """Returns Keras's own loop, which jits `train_step`; the model's class fuses `train_step`."""
    import keras

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    model: Any = None
    own_step: Any = None

    class Net(keras.Model):
        def train_step(self, state, data):
            return own_step(state, data)

    def start(dtype):
        nonlocal model
        model = _keras_model(dtype, Net)
        model.compile(keras.optimizers.Adam(RATE), loss, jit_compile=True)
        model.optimizer.build(model.trainable_variables)
        return model

    def step(state, data):
        return keras.Model.train_step(model, state, data)

    def run(compiled, model, x, y):
        nonlocal own_step
        own_step = compiled
        losses = model.fit(np.asarray(x), np.asarray(y), ROWS, epochs=1, shuffle=False, verbose=0)
        return model, losses.history["loss"][0]

    def observed(model):
        return [each.value for each in (*model.variables, *model.optimizer.variables)]

    return Framework(start, step, itself, run, observed, jits_itself=True)
