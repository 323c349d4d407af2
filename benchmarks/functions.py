"""Functions as epilogues, as a user would write them: of float32 products and operands."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

_BF16 = jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class Function:
    """A function of a product.

    Attributes:
        apply: the function.
        operands: the extents of each operand by name, in ``m``, ``n``, ``1`` and ``g`` (the
            groups).
    """

    apply: Callable[..., Any]
    operands: dict[str, str] = dataclasses.field(default_factory=dict)


def _bias_gelu_dropout(acc: jax.Array, bias: jax.Array, residual: jax.Array) -> jax.Array:
    kept = jax.random.bernoulli(jax.random.key(0), 0.9, acc.shape)
    return (jnp.where(kept, jax.nn.gelu(acc + bias) / 0.9, 0) + residual).astype(_BF16)


def _fp8_with_amax(acc: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = jax.nn.hard_swish(acc)
    return y.astype(jnp.float8_e4m3fn), jnp.max(jnp.abs(y))


def _clipped_gate(
    g: jax.Array, u: jax.Array, bias_gate: jax.Array, bias_up: jax.Array
) -> jax.Array:
    return (jnp.clip(jax.nn.silu(g + bias_gate), -5, 5) * (u + bias_up)).astype(_BF16)


FUNCTIONS = {
    "mish": Function(lambda acc: jax.nn.mish(acc).astype(_BF16)),
    "silu slope": Function(
        lambda acc, slope: (acc * jax.nn.sigmoid(slope * acc)).astype(_BF16), {"slope": ""}
    ),
    "dropout": Function(_bias_gelu_dropout, {"bias": "n", "residual": "mn"}),
    "relu2 row scale": Function(
        lambda acc, scale: (jnp.square(jax.nn.relu(acc)) * scale).astype(_BF16), {"scale": "m1"}
    ),
    "softcap": Function(
        lambda acc, bias: (30 * jnp.tanh(acc / 30) + bias).astype(_BF16), {"bias": "n"}
    ),
    "fp8 amax": Function(_fp8_with_amax),
    "zero points": Function(
        lambda acc, row, column: (acc * row + column).astype(_BF16), {"row": "m1", "column": "n"}
    ),
    "gated clip": Function(_clipped_gate, {"bias_gate": "n", "bias_up": "n"}),
    "two results": Function(
        lambda acc, bias: (jax.nn.gelu(acc + bias).astype(_BF16), (acc + bias).astype(_BF16)),
        {"bias": "n"},
    ),
    "silu bias": Function(
        lambda acc, bias: jax.nn.silu(acc + bias).astype(bias.dtype), {"bias": "n"}
    ),
    "mish residual": Function(
        lambda acc, residual: (jax.nn.mish(acc) + residual).astype(residual.dtype),
        {"residual": "mn"},
    ),
    "scale": Function(lambda acc, scale: (jax.nn.silu(acc) * scale).astype(_BF16), {"scale": "g"}),
}
