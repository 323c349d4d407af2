"""Packed weights in the quantized ``Dense`` layers of Keras, with the JAX backend.

This module needs Keras, so the package does not import it:
``from jax_tcgemm.adapters.keras_dense import pack_layers``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras  # pyright: ignore[reportMissingImports]
import numpy as np

from jax_tcgemm.api.dot_general import dot_general
from jax_tcgemm.quantized.arrays import Quantized
from jax_tcgemm.quantized.packed import pack

_MODES = ("int8", "int4", "gptq", "awq")
# The variables of each mode that a packed weight replaces.
_VARIABLES = ("_kernel", "quantized_kernel", "kernel_scale", "kernel_zero", "g_idx")
# The variables of a packed weight.
_PACKED = ("packed_values", "packed_scales")
_ZERO_POINTS = (-8, 16)


def dense_weight(layer: keras.layers.Dense) -> Quantized:
    """Returns the weight of a quantized ``keras.layers.Dense``, ``(k, n)``.

    Keras divides by the scale of whole columns in the modes int8 and int4, so ``scale`` is the
    reciprocal of ``kernel_scale`` there. The rows of a weight of the mode ``awq`` are still
    multiplied by ``awq_scales``.

    Args:
        layer: a layer after ``layer.quantize("int8")``, ``"int4"``, or of a model that is quantized
            by ``"gptq"`` or ``"awq"``.

    Returns:
        The weight: int8, int4 (modes int8 and int4), or uint4 with zero points.

    Raises:
        ValueError: the layer is not quantized, or in a way that is not accepted.
    """
    mode = layer.quantization_mode
    if mode not in _MODES:
        raise _refused(layer, "quantization_mode", mode, ", ".join(_MODES))
    if _is_packed(layer):
        shape = tuple(layer.packed_values.shape)
        raise _refused(layer, "packed_values.shape", shape, "a layer that is not packed")
    if layer.lora_enabled:
        raise _refused(layer, "lora_enabled", True, "False")
    if mode in ("gptq", "awq"):
        return _calibrated(layer, mode)
    if layer.inputs_quantizer is not None:
        accepted = "None: weights alone are quantized"
        raise _refused(layer, "inputs_quantizer", layer.inputs_quantizer, accepted)
    kernel, scale = _array(layer._kernel), _array(layer.kernel_scale)
    if mode == "int8":
        return Quantized(kernel, 1 / scale.reshape(1, -1))
    # Two numbers in a byte along n, the first one in the low nibble.
    q = jnp.stack([kernel << 4 >> 4, kernel >> 4], -1).reshape(kernel.shape[0], -1)
    q = q[:, : layer.units].astype(jnp.int4)
    if scale.ndim == 1:
        return Quantized(q, 1 / scale.reshape(1, -1))
    _check_groups(layer, q.shape[0], scale.shape[0])
    return Quantized(q, scale, _zero_point(layer, _array(layer.kernel_zero)))


def _calibrated(layer: Any, mode: str) -> Quantized:
    """Returns the weight of a layer of the modes gptq and awq."""
    if not getattr(layer, f"is_{mode}_calibrated"):
        raise _refused(layer, f"is_{mode}_calibrated", False, "True")
    kernel = _array(layer.quantized_kernel)  # (n / 2, k)
    if kernel.shape[0] != -(-layer.units // 2):
        raise _refused(layer, "kernel.shape", kernel.shape, "that of 4 bits, two in a byte")
    codes = jnp.stack([kernel & 15, kernel >> 4], 1).reshape(-1, kernel.shape[1])[: layer.units].T
    scale, zero = _array(layer.kernel_scale).T, _array(layer.kernel_zero).T  # (groups, n)
    _check_groups(layer, codes.shape[0], scale.shape[0])
    return Quantized(codes.astype(jnp.uint4), scale, _zero_point(layer, zero))


def pack_layers(
    model: keras.Model, predicate: Callable[[keras.layers.Dense], bool] | None = None
) -> list[str]:
    """Packs the weights of the quantized ``Dense`` layers of a model, in place.

    The variables ``packed_values`` and ``packed_scales`` replace a layer's quantized variables, so
    they are arguments of the compiled functions. The products then are those of
    ``jax_tcgemm.dot_general``. Call this after the weights are loaded: Keras cannot save a packed
    model.

    Args:
        model: a quantized model, or one layer.
        predicate: function of a layer, which says whether to pack it; ``None`` means all that are
            quantized to weights of int8, int4, ``gptq`` or ``awq``. Packed layers stay packed.

    Returns:
        The names of the packed layers.

    Raises:
        RuntimeError: the backend of Keras is not JAX.
        ValueError: a layer is quantized in a way that is not accepted. The layers before it are
            packed by then.
    """
    if keras.backend.backend() != "jax":
        raise RuntimeError(f"keras.backend is {keras.backend.backend()!r}; accepted: 'jax'")
    names = []
    for layer in model._flatten_layers():
        is_dense = type(layer) is keras.layers.Dense and layer.quantization_mode in _MODES
        is_dense = is_dense and not _is_packed(layer)
        if is_dense and (predicate is None or predicate(layer)):
            _pack(layer)
            names.append(layer.name)
    for kind in ("train", "test", "predict"):
        if hasattr(model, f"{kind}_function"):
            setattr(model, f"{kind}_function", None)  # compiled with the former variables
    return names


def _pack(layer: Any) -> None:
    """Replaces the variables of one layer, and the function that computes it."""
    weight = pack(dense_weight(layer))
    leaves, tree = jax.tree.flatten(weight)
    for name in _VARIABLES:
        if isinstance(getattr(layer, name, None), keras.Variable):
            delattr(layer, name)
    layer._tracker.unlock()
    for name, value in zip(_PACKED, leaves, strict=True):
        options = {"initializer": "zeros", "trainable": False, "autocast": False}
        variable = layer.add_weight(value.shape, dtype=value.dtype.name, name=name, **options)
        variable.assign(value)
        setattr(layer, name, variable)
    layer._tracker.lock()
    layer.quantized_call = functools.partial(_call, layer, tree)


def _call(layer: Any, tree: Any, inputs: Any, training: Any = None) -> Any:
    """Computes a ``Dense`` layer; ``tree`` is the structure of its packed weight."""
    weight = jax.tree.unflatten(tree, [getattr(layer, name).value for name in _PACKED])
    x = jnp.asarray(inputs)
    if layer.quantization_mode == "awq":
        x = (x / layer.awq_scales.value).astype(x.dtype)
    y = dot_general(x, weight, (((x.ndim - 1,), (0,)), ((), ())))
    if layer.bias is not None:
        y = keras.ops.add(y, layer.bias)
    return y if layer.activation is None else layer.activation(y)


def _zero_point(layer: Any, zero: Any) -> Any:
    """Returns zero points as int8, and checks that ``pack`` accepts them."""
    lowest, highest = _ZERO_POINTS
    extremes = int(zero.min()), int(zero.max())
    if extremes[0] < lowest or extremes[1] > highest:
        accepted = f"zero points from {lowest} to {highest}"
        raise _refused(layer, "kernel_zero", extremes, accepted)
    return zero.astype(jnp.int8)


def _is_packed(layer: Any) -> bool:
    return hasattr(layer, _PACKED[0])


def _array(variable: Any) -> Any:
    return jnp.asarray(variable.value)


def _check_groups(layer: Any, k: int, groups: int) -> None:
    """Checks that the groups have the same size and follow each other along k."""
    if k % groups:
        raise _refused(layer, "groups", groups, f"a divisor of k={k}")
    found, expected = np.asarray(layer.g_idx.value), np.arange(k) // (k // groups)
    if (wrong := found != expected).any():
        at = int(np.argmax(wrong))
        accepted = f"{expected[at]}: no permuted groups"
        raise _refused(layer, f"g_idx[{at}]", int(found[at]), accepted)


def _refused(layer: Any, key: str, value: Any, accepted: str) -> ValueError:
    return ValueError(f"{layer.name}.{key}={value!r} is not accepted; accepted: {accepted}")
