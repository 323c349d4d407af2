"""The activations of the fused epilogue.

Each row has the name that users give, the C++ functor of the same role, and the ``jax.numpy``
function. That function is the lowering on platforms without a kernel and the basis of the
derivative. The self-test and the tests compare both with a formula in float64. Users call a
function instead of giving a name for an activation with parameters; the function makes the
activation from the parameters.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm.problem.exact import ComparedExactly


@dataclasses.dataclass(frozen=True, eq=False)
class Activation(ComparedExactly):
    """One activation of the fused epilogue; hashable and compared by its values.

    Attributes:
        name: what users pass as ``activation=``, or the function that makes it.
        cpp_name: the functor in ``cuda/epilogue``, and the custom call's attribute.
        function: the activation of a ``jax.Array`` and the parameters.
        parameters: float32 numbers, at most two; the custom call's ``activation_p0`` and ``_p1``.
    """

    name: str
    cpp_name: str
    function: Callable[..., jax.Array]
    parameters: tuple[float, ...] = ()

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of a custom call that computes the activation."""
        p0, p1 = (*self.parameters, 0.0, 0.0)[:2]
        parameters = {"activation_p0": np.float32(p0), "activation_p1": np.float32(p1)}
        return {"activation": self.cpp_name, **parameters}

    def reference(self, x: jax.Array) -> jax.Array:
        """Returns the activation of ``x``, elementwise."""
        return self.function(x, *self.parameters)

    def exact(self, x: np.ndarray) -> np.ndarray:
        """Returns the activation of a float64 array, elementwise, by a formula of its own."""
        return _FORMULAS[self.name](x, *self.parameters)

    def derivative(self, x: jax.Array) -> jax.Array:
        """Returns the derivative of the activation at ``x``, elementwise."""
        return jax.jvp(self.reference, (x,), (jnp.ones_like(x),))[1]

    def __str__(self) -> str:
        return (
            f"{self.name}({', '.join(map(str, self.parameters))})" if self.parameters else self.name
        )


def _identity(x: jax.Array) -> jax.Array:
    return x


def _relu_squared(x: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.relu(x))


def _softcap(x: jax.Array, cap: float) -> jax.Array:
    return cap * jnp.tanh(x / cap)


def _clip(x: jax.Array, lower: float, upper: float) -> jax.Array:
    return jnp.clip(x, lower, upper)  # pickle finds this function by its name, not jnp.clip


_ROWS = (
    Activation("relu", "Relu", jax.nn.relu),
    Activation("relu_squared", "ReluSquared", _relu_squared),
    Activation("gelu", "Gelu", functools.partial(jax.nn.gelu, approximate=True)),
    Activation("gelu_exact", "GeluExact", functools.partial(jax.nn.gelu, approximate=False)),
    Activation("silu", "Silu", jax.nn.silu),
    Activation("sigmoid", "Sigmoid", jax.nn.sigmoid),
    Activation("tanh", "Tanh", jnp.tanh),
)

_erf = np.vectorize(math.erf, otypes=[np.float64])

# Written independently of the rows, so that comparisons with them find mistakes there.
_FORMULAS: dict[str, Callable[..., np.ndarray]] = {
    "none": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "relu_squared": lambda x: np.maximum(x, 0) ** 2,
    "gelu": lambda x: x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "gelu_exact": lambda x: x / 2 * (1 + _erf(x / 2**0.5)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "tanh": np.tanh,
    "softcap": lambda x, cap: cap * np.tanh(x / cap),
    "clip": lambda x, lower, upper: np.minimum(np.maximum(x, lower), upper),
}

_IDENTITY = Activation("none", "", _identity)

ACTIVATIONS: dict[str, Activation] = {row.name: row for row in _ROWS}


def softcap(cap: float) -> Activation:
    """Returns the activation ``cap * tanh(x / cap)``, for ``activation=``.

    Args:
        cap: a Python number above 0; no result exceeds it.

    Raises:
        TypeError: ``cap`` is not a number (a traced one cannot be a parameter).
        ValueError: ``cap`` is not above 0 and finite.

    Example:
        >>> logits = gemm(x, w, activation=softcap(30.0))
        >>> bool((jnp.abs(logits) <= 30).all())
        True
    """
    cap = _parameter("cap", cap)
    if not 0 < cap < math.inf:
        raise ValueError(f"cap={cap} must be above 0 and finite")
    return Activation("softcap", "Softcap", _softcap, (cap,))


def clip(lower: float, upper: float) -> Activation:
    """Returns the activation ``min(max(x, lower), upper)``, for ``activation=``.

    Args:
        lower: a Python number, which may be ``-inf``.
        upper: a Python number, which may be ``inf``. NaN passes, as in ``jnp.clip``.

    Raises:
        TypeError: a bound is not a number (a traced one cannot be a parameter).
        ValueError: ``lower`` is above ``upper``, or one of them is NaN.

    Example:
        >>> y = gemm(x, w, activation=clip(0.0, 6.0))
        >>> bool((y >= 0).all() and (y <= 6).all())
        True
    """
    lower, upper = _parameter("lower", lower), _parameter("upper", upper)
    if not lower <= upper:
        raise ValueError(f"lower={lower} must not be above upper={upper}")
    return Activation("clip", "Clip", _clip, (lower, upper))


def _parameter(name: str, value: float) -> float:
    if isinstance(value, (str, bytes)):
        raise TypeError(f"{name}={value!r} must be a Python number")
    try:
        return float(value)
    except (TypeError, ValueError) as error:  # A tracer raises a TypeError of JAX's own.
        raise TypeError(f"{name}={value!r} must be a Python number") from error


def resolve(activation: str | Activation | None) -> Activation:
    """Returns the activation for ``activation=``; the identity for ``None``.

    Raises:
        ValueError: there is no activation of that name.
    """
    if activation is None:
        return _IDENTITY
    if isinstance(activation, Activation):
        return activation
    row = ACTIVATIONS.get(activation) if isinstance(activation, str) else None
    if row is None:
        raise ValueError(
            f"activation={activation!r} is unknown; accepted: None, {sorted(ACTIVATIONS)}, "
            "jax_tcgemm.softcap(...) or jax_tcgemm.clip(...)"
        )
    return row
