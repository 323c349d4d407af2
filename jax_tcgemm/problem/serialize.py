"""The static parameters of primitives as text, for programs compiled elsewhere.

The text is only JSON: it may come from a file. The constructors that it names check the values.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.lax import DotAlgorithmPreset, Precision

from jax_tcgemm.problem import activations
from jax_tcgemm.problem.activations import Activation
from jax_tcgemm.problem.strides import Operands

_MADE_BY = {"softcap": activations.softcap, "clip": activations.clip}


def to_json(value: Any) -> str:
    """Returns parameters as text; equal parameters give equal texts.

    Args:
        value: made of dataclasses, tuples, numbers, texts, dtypes, precisions and activations.
    """
    return json.dumps(_encoded(value), sort_keys=True, separators=(",", ":"))


def from_json(text: str, classes: tuple[type, ...]) -> Any:
    """Returns the value that ``to_json`` was given.

    Args:
        text: the result of ``to_json``.
        classes: the dataclasses that may occur in the text.
    """
    return _decoded(json.loads(text), {each.__name__: each for each in classes})


def _encoded(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, np.dtype):
        return {"dtype": value.name}
    if isinstance(value, (Precision, DotAlgorithmPreset)):
        return {type(value).__name__: value.name}
    if isinstance(value, Activation):
        return {"activation": [value.name, *(p.hex() for p in value.parameters)]}
    if isinstance(value, Operands):
        return {"operands": {k: _encoded(v) for k, v in value._asdict().items() if v is not None}}
    if isinstance(value, tuple):
        return [_encoded(item) for item in value]
    assert dataclasses.is_dataclass(value), value
    fields = {f.name: _encoded(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return {type(value).__name__: fields}


def _decoded(value: Any, classes: dict[str, type]) -> Any:
    if isinstance(value, list):
        return tuple(_decoded(item, classes) for item in value)
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind in classes:
        return classes[kind](**{k: _decoded(v, classes) for k, v in content.items()})
    return _DECODERS[kind](content, classes)


def _activation(content: Any, _: Any) -> Activation:
    name, *parameters = content
    if name in _MADE_BY:
        return _MADE_BY[name](*map(float.fromhex, parameters))
    return activations.resolve(None if name == "none" else name)


_DECODERS = {
    "float": lambda x, _: float.fromhex(x),
    "complex": lambda x, _: complex(*map(float.fromhex, x)),
    "dtype": lambda x, _: jnp.dtype(x),
    "Precision": lambda x, _: Precision[x],
    "DotAlgorithmPreset": lambda x, _: DotAlgorithmPreset[x],
    "operands": lambda x, classes: Operands(
        **{"a": None, "b": None} | {k: _decoded(v, classes) for k, v in x.items()}
    ),
    "activation": _activation,
}
