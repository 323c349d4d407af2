"""Quantized Dense layers of Keras with packed weights."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_values import assert_close_in_norm

pytestmark = [pytest.mark.any_jax, pytest.mark.filterwarnings("default")]

os.environ.setdefault("KERAS_BACKEND", "jax")  # Keras reads this when it is imported
keras = pytest.importorskip("keras")

from jax_tcgemm.adapters import keras_dense  # noqa: E402

FEATURES, HIDDEN, OUT = 64, 38, 7


def built(dtype="float32", features=FEATURES):
    inputs = keras.Input((features,))
    x = keras.layers.Dense(HIDDEN, activation="gelu", dtype=dtype, name="hidden")(inputs)
    return keras.Model(inputs, keras.layers.Dense(OUT, use_bias=False, dtype=dtype, name="out")(x))


def quantized(mode, block=None, dtype="float32", features=FEATURES):
    """Returns a model whose weights alone are quantized."""
    model = built(dtype, features)
    quantizers = keras.quantizers
    if mode == "int8":
        config = quantizers.Int8QuantizationConfig(activation_quantizer=None)
    else:
        config = quantizers.Int4QuantizationConfig(block_size=block, activation_quantizer=None)
    model.quantize(mode, config=config)
    return model


def calibrated(mode, rng, group):
    """Returns a model in the state that Keras's GPTQ or AWQ leaves it in, with drawn weights."""
    model = built()
    if mode == "gptq":
        config = keras.quantizers.GPTQConfig(None, None, group_size=group)
    else:
        config = keras.quantizers.AWQConfig(None, None, group_size=group)
    for name in ("hidden", "out"):
        layer = model.get_layer(name)
        layer.quantize(mode, config=config)
        k, n = layer.kernel_shape
        codes = rng.integers(0, 16, (n, k)).astype(np.uint8)
        layer.quantized_kernel.assign(keras.quantizers.pack_int4(codes, axis=0, dtype="uint8")[0])
        groups = layer.kernel_scale.shape[1]
        layer.kernel_scale.assign(rng.uniform(0.01, 0.02, (n, groups)))
        layer.kernel_zero.assign(rng.integers(1, 17, (n, groups)))
        layer.g_idx.assign(np.arange(k) // (k // groups))
        if mode == "awq":
            layer.awq_scales.assign(rng.uniform(0.5, 2, k))
        setattr(layer, f"is_{mode}_calibrated", True)
    return model


KINDS = {
    "int8": lambda rng: quantized("int8"),
    "int4": lambda rng: quantized("int4"),
    "int4, blocks, bfloat16": lambda rng: quantized("int4", 2, "mixed_bfloat16"),
    "gptq": lambda rng: calibrated("gptq", rng, 2),
    "awq, columns": lambda rng: calibrated("awq", rng, -1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_layers(rng, normal, monkeypatch, kind):
    model, x = KINDS[kind](rng), normal(5, FEATURES)
    model.get_layer("hidden").bias.assign(rng.standard_normal(HIDDEN))
    expected = model(x)
    assert keras_dense.pack_layers(model) == ["hidden", "out"]
    names = {variable.name for variable in model.non_trainable_variables}
    assert {"packed_values", "packed_scales"} <= names
    assert not names & {"kernel_scale", "kernel_zero", "g_idx"}
    products = []
    right = keras_dense.dot_general
    monkeypatch.setattr(keras_dense, "dot_general", lambda *x: products.append(len(x)) or right(*x))
    assert_close_in_norm(model(x), expected)
    assert len(products) == 2


def test_compiled_models_take_packed_weights_as_arguments(normal):
    model, x = quantized("int4", 2), normal(5, FEATURES)
    expected = model.predict(np.asarray(x), verbose=0)
    keras_dense.pack_layers(model)
    assert_close_in_norm(model.predict(np.asarray(x), verbose=0), expected)
    both = model.trainable_variables, model.non_trainable_variables
    lists = [[v.value for v in own] for own in both]
    run = jax.jit(lambda *lists: model.stateless_call(*lists, x)[0])
    assert_close_in_norm(run(*lists), expected)
    halved = [v if v.dtype == jnp.uint8 else v / 2 for v in lists[1]]
    assert np.any(np.asarray(run(lists[0], halved)) != np.asarray(expected))  # no constants


def test_gradients_reach_the_inputs(normal):
    model, x = quantized("int4", 2), normal(5, FEATURES)
    expected = jax.grad(lambda x: jnp.sum(jnp.sin(model(x))))(x)
    keras_dense.pack_layers(model)
    assert_close_in_norm(jax.grad(lambda x: jnp.sum(jnp.sin(model(x))))(x), expected)


def test_chosen_layers_alone(normal):
    model, x = quantized("int4"), normal(5, FEATURES)
    expected = model(x)
    assert keras_dense.pack_layers(model, lambda layer: layer.units == OUT) == ["out"]
    assert hasattr(model.get_layer("hidden"), "kernel_scale")
    assert_close_in_norm(model(x), expected)
    assert keras_dense.pack_layers(model.get_layer("hidden")) == ["hidden"]
    assert_close_in_norm(model(x), expected)
    assert keras_dense.pack_layers(model) == []
    with pytest.raises(
        ValueError, match=r"out.packed_values.shape=\(1, 1, 128, 16\) .* not packed"
    ):
        keras_dense.dense_weight(model.get_layer("out"))


def test_refused_layers(rng):
    layer = calibrated("gptq", rng, 2).get_layer("out")
    keras_dense.dense_weight(layer)
    changes = [
        (layer.kernel_zero, layer.kernel_zero.value + 99, "out.kernel_zero="),
        (layer.g_idx, layer.g_idx.value[::-1], r"out.g_idx\[0\]=18"),
    ]
    for variable, value, message in changes:
        before = variable.value
        variable.assign(value)
        with pytest.raises(ValueError, match=message):
            keras_dense.dense_weight(layer)
        variable.assign(before)
    layer.is_gptq_calibrated = False
    with pytest.raises(ValueError, match=r"out.is_gptq_calibrated=False"):
        keras_dense.dense_weight(layer)
    with pytest.raises(ValueError, match=r"hidden.g_idx\[\d+\]=|hidden.groups=22"):
        keras_dense.pack_layers(quantized("int4", 3))  # 64 is no multiple of 3


def test_refused_quantizers():
    model = built()
    with pytest.raises(ValueError, match=r"out.quantization_mode=None"):
        keras_dense.dense_weight(model.get_layer("out"))
    model.quantize("int8")  # Keras quantizes activations by default
    with pytest.raises(ValueError, match=r"out.inputs_quantizer=.* weights alone"):
        keras_dense.dense_weight(model.get_layer("out"))
    model = quantized("int4")
    model.get_layer("out").enable_lora(2)
    with pytest.raises(ValueError, match=r"out.lora_enabled=True"):
        keras_dense.dense_weight(model.get_layer("out"))
