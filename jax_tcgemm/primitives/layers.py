"""Two layers, the first of which is hidden, with their own derivative rule.

The rule is a forward derivative, from which JAX makes the reverse pass. The tangent of the hidden
layer goes into the second product as one linear primitive. The transpose of that primitive is the
gemm that multiplies by the derivative of the activation in its epilogue.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jax_tcgemm import _compat
from jax_tcgemm.lowering import reference
from jax_tcgemm.primitives import gemm as gemm_primitive
from jax_tcgemm.primitives import mlp_backward
from jax_tcgemm.primitives.gemm import ACTIVATION, PREACTIVATION
from jax_tcgemm.primitives.tangents import linear_tangents
from jax_tcgemm.problem.epilogue import Epilogue
from jax_tcgemm.problem.spec import GemmSpec, flatten
from jax_tcgemm.problem.strides import Operands


@dataclasses.dataclass(frozen=True)
class Layers:
    """The static parameters of both layers."""

    first: GemmSpec
    second: GemmSpec
    recompute_activation: bool


def apply(layers: Layers, first: Operands, second: Operands, out_sharding: Any) -> jax.Array:
    """Computes both layers; inside, the explicit axes of a mesh are automatic.

    Args:
        layers: the static parameters.
        first: the operands of the first layer.
        second: the operands of the second layer; ``a`` is None and becomes the hidden layer.
        out_sharding: sharding of the result's type. By default it is that of the same operations of
            JAX.
    """
    operands = [x for x in (*first, *second) if x is not None]
    if _compat.is_unreduced(*operands):
        return _compat.resharded(forward(layers, first, second), out_sharding)
    if out_sharding is None and _compat.is_sharded(*operands):
        composed = functools.partial(_composed, layers)
        out_sharding = _compat.shardings_of(composed, first, second)
    if out_sharding is None:
        return forward(layers, first, second)
    run = functools.partial(forward, layers)
    return _compat.with_automatic_axes(run, (first, second), out_sharding)


def _composed(layers: Layers, first: Operands, second: Operands) -> jax.Array:
    hidden = reference.reference_gemm(*flatten(first), spec=layers.first)[0]
    return reference.reference_gemm(*flatten(second._replace(a=hidden)), spec=layers.second)[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def forward(layers: Layers, first: Operands, second: Operands) -> jax.Array:
    """Computes both layers; ``second.a`` is None and becomes the hidden layer."""
    (hidden,) = gemm_primitive.bind(first, layers.first)
    return gemm_primitive.bind(second._replace(a=hidden), layers.second)[0]


def _jvp(
    layers: Layers, primals: tuple[Operands, Operands], tangents: tuple[Operands, Operands]
) -> tuple[jax.Array, jax.Array]:
    """Derives ``y = h @ w + bias + c`` by ``y' = h' @ w + h @ w' + bias' + c'``."""
    first, second = primals
    d_first, d_second = (
        Operands(*(None if isinstance(t, SymbolicZero) else t for t in operands))
        for operands in tangents
    )
    hidden, saved, d_saved = _first_layer(layers.first, first, d_first)
    y = gemm_primitive.bind(second._replace(a=hidden), layers.second)[0]
    addends = [] if d_second.c is None else [_full(d_second.c, y, layers.second)]
    if any(t is not None for t in d_saved):
        d_saved = [
            jnp.zeros_like(z) if t is None else t for z, t in zip(saved, d_saved, strict=True)
        ]
        addends.append(_through_second_layer(layers, d_saved, saved, second.b))
    tangent = sum(addends[1:], addends[0]) if addends else jnp.zeros_like(y)
    if d_second.b is not None or d_second.bias is not None:
        dx = Operands(None, d_second.b, c=tangent if addends else None, bias=d_second.bias)
        tangent = _second_layer(layers, hidden, saved, second.b, dx)
    # A bias or residual may vary, or be sharded, over fewer mesh axes than the result.
    return y, _compat.typed_as(y, tangent)


forward.defjvp(_jvp, symbolic_zeros=True)


def _second_layer(
    layers: Layers, hidden: jax.Array, saved: Sequence[jax.Array], w: jax.Array, dx: Operands
) -> jax.Array:
    """Returns ``hidden @ w' + bias' + c'``; C passes its cotangent on unchanged."""
    axes = layers.second.axes._replace(c=tuple(range(hidden.ndim)))
    spec = layers.second.replace(axes=axes)

    def product(hidden: jax.Array, dx: Operands) -> Any:
        return linear_tangents(Operands(hidden, w), dx, spec, gemm_primitive.bind)[0]

    def product_again(saved: Sequence[jax.Array], dx: Operands) -> Any:
        return product(_activated(layers.first, saved), dx)

    if layers.recompute_activation:
        return jax.checkpoint(product_again, prevent_cse=False)(saved, dx)
    return product(checkpoint_name(hidden, ACTIVATION), dx)


def _first_layer(
    spec: GemmSpec, x: Operands, dx: Operands
) -> tuple[jax.Array, list[jax.Array], list[jax.Array | None]]:
    """Returns the hidden layer, its pre-activations and their tangents."""
    every = (True,) * len(spec.epilogue.results)
    hidden, *saved = gemm_primitive.bind(x, spec.replace(results=every))
    d_saved = linear_tangents(x, dx, spec, gemm_primitive.bind)
    return hidden, [checkpoint_name(z, PREACTIVATION) for z in saved], d_saved


def _activated(spec: GemmSpec, saved: Sequence[jax.Array]) -> jax.Array:
    """Returns the hidden layer for given pre-activations."""
    return reference.epilogue(saved, Operands(None, None), spec)[0]


def _through_second_layer(
    layers: Layers, tangents: Sequence[jax.Array], saved: Sequence[jax.Array], w: jax.Array
) -> jax.Array:
    form = "gated_derivative" if layers.first.is_gated else "derivative"
    spec = layers.second.product(epilogue=Epilogue(form, layers.first.activation))
    return mlp_backward.bind(tangents, saved, w, spec)


def _full(tangent: jax.Array, y: jax.Array, spec: GemmSpec) -> jax.Array:
    """Returns the tangent of the residual over the whole result."""
    term = reference.over_result("c", Operands(None, None, c=tangent), spec, y.dtype)
    return jnp.broadcast_to(term, y.shape)
