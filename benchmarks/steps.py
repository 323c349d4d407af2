"""Layers whose value and gradients a case computes, by this package and by natural JAX."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from functions import FUNCTIONS

from jax_tcgemm import fuse, gated_mlp, gemm, mlp

Arrays = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Step:
    """A function of ``x (m, k)`` and its weights.

    Attributes:
        ours: computes it by this package; if ``None``, ``fuse`` rewrites ``xla`` and its gradients.
        xla: computes it by the natural JAX expression.
        weights: the extents of each weight by name, in ``m, n, k``.
        result: the extents of the result.
        products: how often the value and the gradients multiply ``m n k`` numbers.
    """

    ours: Callable[..., jax.Array] | None
    xla: Callable[..., jax.Array]
    weights: dict[str, str]
    result: str
    products: int

    def shapes(self, m: int, n: int, k: int) -> dict[str, tuple[int, ...]]:
        """Returns the shape of each operand; ``g``, the cotangent of the result, is last."""
        extents = {"m": m, "n": n, "k": k}
        names = {"x": "mk", **self.weights, "g": self.result}
        return {name: tuple(extents[letter] for letter in own) for name, own in names.items()}


def own_value_and_gradients(step: Step, arrays: Arrays) -> list[Any]:
    """Returns ``value_and_gradients`` of a step by this package."""
    if step.ours is not None:
        return value_and_gradients(step.ours, arrays)
    return fuse(functools.partial(value_and_gradients, step.xla))(arrays)


def value_and_gradients(function: Callable[..., jax.Array], arrays: Arrays) -> list[Any]:
    """Returns the value of a function of all arrays except ``g``, and the cotangents for ``g``."""
    operands = {name: array for name, array in arrays.items() if name != "g"}
    y, pullback = jax.vjp(lambda operands: function(**operands), operands)
    (gradients,) = pullback(arrays["g"])
    return [y, *gradients.values()]


def _layer(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
    return gemm(x, w, bias=bias, activation="gelu")


def _xla_layer(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
    return jax.nn.gelu(x @ w + bias)


def _constrained(hidden: jax.Array, sharding: Any) -> jax.Array:
    return hidden if sharding is None else jax.lax.with_sharding_constraint(hidden, sharding)


def _xla_mlp(
    x: jax.Array,
    w1: jax.Array,
    b1: jax.Array,
    w2: jax.Array,
    b2: jax.Array,
    hidden_sharding: Any = None,
) -> jax.Array:
    return _constrained(jax.nn.gelu(x @ w1 + b1), hidden_sharding) @ w2 + b2


def _xla_gated_mlp(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    hidden_sharding: Any = None,
) -> jax.Array:
    hidden = jax.nn.silu(x @ w_gate) * (x @ w_up)
    return _constrained(hidden, hidden_sharding) @ w_down


def _normalized(x: jax.Array, gain: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)
    return (wide * scale).astype(x.dtype) * gain


def _xla_block(x: jax.Array, **w: jax.Array) -> jax.Array:
    """A transformer block over one sequence, heads of 128."""
    head = min(128, x.shape[1])
    h = _normalized(x, w["gain1"])
    q, k, v = ((h @ w[name]).reshape(1, x.shape[0], -1, head) for name in ("wq", "wk", "wv"))
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + mixed.reshape(x.shape) @ w["wo"]
    h = _normalized(x, w["gain2"])
    return x + (jax.nn.silu(h @ w["w_gate"]) * (h @ w["w_up"])) @ w["w_down"]


def _function_step(name: str, products: int = 3) -> Step:
    """A layer whose epilogue is a function of ``functions.py``."""
    function = FUNCTIONS[name]

    def ours(x: jax.Array, w: jax.Array, **operands: jax.Array) -> jax.Array:
        return gemm(x, w, epilogue=function.apply, epilogue_operands=tuple(operands.values()))

    def xla(x: jax.Array, w: jax.Array, **operands: jax.Array) -> jax.Array:
        return function.apply((x @ w).astype(jnp.float32), *operands.values())

    return Step(ours, xla, {"w": "kn", **function.operands}, "mn", products)


def _function_mlp(name: str) -> Step:
    """Two layers; the first has a function of ``functions.py`` as its epilogue."""
    function = FUNCTIONS[name]

    def ours(x: jax.Array, w1: jax.Array, w2: jax.Array, **operands: jax.Array) -> jax.Array:
        given = tuple(operands.values())
        return mlp(x, w1, None, w2, epilogue=function.apply, epilogue_operands=given)

    def xla(x: jax.Array, w1: jax.Array, w2: jax.Array, **operands: jax.Array) -> jax.Array:
        return function.apply((x @ w1).astype(jnp.float32), *operands.values()) @ w2

    return Step(ours, xla, {"w1": "kn", "w2": "nk", **function.operands}, "mk", 6)


_MLP = {"w1": "kn", "b1": "n", "w2": "nk", "b2": "k"}
_GATED_MLP = {"w_gate": "kn", "w_up": "kn", "w_down": "nk"}
_BLOCK = {**dict.fromkeys(("wq", "wk", "wv", "wo"), "kk"), **_GATED_MLP, "gain1": "k", "gain2": "k"}

STEPS = {
    "gelu layer": Step(_layer, _xla_layer, {"w": "kn", "bias": "n"}, "mn", 3),
    "mlp": Step(mlp, _xla_mlp, _MLP, "mk", 6),
    "gated mlp": Step(gated_mlp, _xla_gated_mlp, _GATED_MLP, "mk", 9),
    "fused mlp": Step(None, _xla_mlp, _MLP, "mk", 6),
    "fused gated mlp": Step(None, _xla_gated_mlp, _GATED_MLP, "mk", 9),
    # For n = 4 k; attention itself is not counted.
    "fused block": Step(None, _xla_block, _BLOCK, "mk", 12),
    **{name: _function_step(name) for name in ("softcap", "silu slope", "dropout")},
    **{f"mlp {name}": _function_mlp(name) for name in ("silu slope", "dropout")},
}
