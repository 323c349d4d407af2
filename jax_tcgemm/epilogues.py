"""The activations of the fused epilogue.

One row each: the name users give, the C++ functor of the same role, and the ``jax.numpy`` function,
which is the lowering on platforms without a kernel, the basis of the derivative and the oracle of
the tests.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Activation:
    """One activation of the fused epilogue.

    Attributes:
        name: what users pass as ``activation=``.
        cpp_name: the functor in ``cuda/epilogue``, and the custom call's attribute.
        reference: the same function of a ``jax.Array``.
    """

    name: str
    cpp_name: str
    reference: Callable[[jax.Array], jax.Array]


_ROWS = (
    Activation("relu", "Relu", jax.nn.relu),
    Activation("gelu", "Gelu", functools.partial(jax.nn.gelu, approximate=True)),
    Activation("gelu_exact", "GeluExact", functools.partial(jax.nn.gelu, approximate=False)),
    Activation("silu", "Silu", jax.nn.silu),
    Activation("sigmoid", "Sigmoid", jax.nn.sigmoid),
    Activation("tanh", "Tanh", jnp.tanh),
)

ACTIVATIONS: dict[str, Activation] = {row.name: row for row in _ROWS}
