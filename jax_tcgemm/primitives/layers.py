"""Two layers, the first of which is hidden, with their own derivative rule.

The hidden layer has a named activation, or a user's function as its epilogue. The rule is a forward
derivative, from which JAX makes the reverse pass. The tangent of the hidden layer goes into the
second product as one linear primitive (``mlp_backward.py``). The transpose of that primitive is one
gemm with the derivative of the activation, or the pullback of the function, in its epilogue.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jax_tcgemm import _compat
from jax_tcgemm.epilogue import linear
from jax_tcgemm.lowering import reference
from jax_tcgemm.primitives import gemm as gemm_primitive
from jax_tcgemm.primitives import jit_epilogue, mlp_backward
from jax_tcgemm.primitives.gemm import ACTIVATION, PREACTIVATION
from jax_tcgemm.primitives.mlp_backward import HiddenSpec
from jax_tcgemm.primitives.tangents import linear_tangents
from jax_tcgemm.problem.epilogue import Epilogue
from jax_tcgemm.problem.spec import GemmSpec, flatten
from jax_tcgemm.problem.strides import Operands

# A hidden layer, its pre-activations, and what takes its tangent through the second layer, which is
# ``None`` if the tangent is zero.
_Hidden = tuple[jax.Array, list[jax.Array], Callable[[], jax.Array] | None]


@dataclasses.dataclass(frozen=True)
class Layers:
    """The static parameters of both layers.

    Attributes:
        first: the hidden layer, a ``GemmSpec``, or a ``CompiledSpec`` with one result.
        second: the second layer.
        recompute_activation: whether the reverse pass computes a named activation again.
        hidden_sharding: the sharding of the hidden layer; ``None`` leaves it to the partitioner.
    """

    first: Any
    second: GemmSpec
    recompute_activation: bool = False
    hidden_sharding: Any = None

    def placed(self, hidden: jax.Array) -> jax.Array:
        """Returns the hidden layer, or a pre-activation, with the constraint on its sharding."""
        if self.hidden_sharding is None:
            return hidden
        return _compat.constrained(hidden, self.hidden_sharding)


def apply(layers: Layers, first: Sequence[Any], second: Operands, out_sharding: Any) -> jax.Array:
    """Computes both layers; inside, the explicit axes of a mesh are automatic.

    Args:
        layers: the static parameters.
        first: the operands of the first layer; ``Operands`` if it has no function.
        second: the operands of the second layer; ``a`` is None and becomes the hidden layer.
        out_sharding: sharding of the result's type. By default it is that of the same operations of
            JAX, or of both layers' types if the first one has a function.
    """
    operands = [x for x in (*first, *second) if x is not None]
    if _compat.is_unreduced(*operands):
        return _compat.resharded(forward(layers, first, second), out_sharding)
    is_named = layers.first.function is None
    if out_sharding is None and is_named and _compat.is_sharded(*operands):
        composed = functools.partial(_composed, layers)
        out_sharding = _compat.shardings_of(composed, first, second)
    if out_sharding is None:
        return forward(layers, first, second)
    # Inside, the mesh of the context has other axis types than the caller's.
    wanted = getattr(layers.hidden_sharding, "spec", layers.hidden_sharding)
    run = functools.partial(forward, dataclasses.replace(layers, hidden_sharding=wanted))
    return _compat.with_automatic_axes(run, (first, second), out_sharding)


def _composed(layers: Layers, first: Operands, second: Operands) -> jax.Array:
    hidden = reference.reference_gemm(*flatten(first), spec=layers.first)[0]
    return reference.reference_gemm(*flatten(second._replace(a=hidden)), spec=layers.second)[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def forward(layers: Layers, first: Sequence[Any], second: Operands) -> jax.Array:
    """Computes both layers.

    Args:
        layers: the static parameters.
        first: the operands of the first layer; ``Operands`` if it has no function.
        second: the operands of the second layer; ``a`` is None and becomes the hidden layer.
    """
    bind: Any = gemm_primitive.bind if layers.first.function is None else jit_epilogue.bind
    hidden = layers.placed(bind(first, layers.first)[0])
    return gemm_primitive.bind(second._replace(a=hidden), layers.second)[0]


def _jvp(
    layers: Layers,
    primals: tuple[Sequence[Any], Operands],
    tangents: tuple[Sequence[Any], Operands],
) -> tuple[jax.Array, jax.Array]:
    """Derives ``y = h @ w + bias + c`` by ``y' = h' @ w + h @ w' + bias' + c'``."""
    first, second = primals
    d_first, d_second = (
        [None if isinstance(t, SymbolicZero) else t for t in operands] for operands in tangents
    )
    derived: Any = _named_layer if layers.first.function is None else _function_layer
    hidden, saved, through = derived(layers, first, d_first, second.b)
    if not layers.recompute_activation:
        hidden = checkpoint_name(hidden, ACTIVATION)
    y = gemm_primitive.bind(second._replace(a=hidden), layers.second)[0]
    d_second = Operands(*d_second)
    addends = [] if d_second.c is None else [_full(d_second.c, y, layers.second)]
    if through is not None:
        addends.append(through())
    tangent: Any = sum(addends[1:], addends[0]) if addends else jnp.zeros_like(y)
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
    return product(hidden, dx)


def _named_layer(layers: Layers, x: Operands, tangents: Sequence[Any], w: jax.Array) -> _Hidden:
    """Derives a hidden layer with a named activation."""
    spec = layers.first
    every = (True,) * len(spec.epilogue.results)
    hidden, *saved = map(layers.placed, gemm_primitive.bind(x, spec.replace(results=every)))
    moving = linear_tangents(x, Operands(*tangents), spec, gemm_primitive.bind)
    saved = [checkpoint_name(z, PREACTIVATION) for z in saved]
    if all(t is None for t in moving):
        return hidden, saved, None

    def through() -> jax.Array:
        form = "gated_derivative" if spec.is_gated else "derivative"
        product = layers.second.product(epilogue=Epilogue(form, spec.activation))
        pairs = zip(saved, moving, strict=True)
        slopes = [jnp.zeros_like(z) if t is None else t for z, t in pairs]
        return mlp_backward.bind([*slopes, *saved, w], HiddenSpec(product))

    return hidden, saved, through


def _function_layer(
    layers: Layers, operands: Sequence[Any], tangents: Sequence[Any], w: jax.Array
) -> _Hidden:
    """Derives a hidden layer with a function; it is kept, so no pre-activations are returned."""
    spec = layers.first
    results, values, slopes = jit_epilogue.with_slopes(operands, tangents, spec)
    hidden = layers.placed(results[0])
    moving = [i for i, slope in enumerate(slopes) if slope is not None]
    if not moving:
        return hidden, [], None

    def through() -> jax.Array:
        wide = jit_epilogue.accumulators_dtype(operands, spec)
        derivative, kept, held = linear.of_epilogue(spec.function, wide, values, moving)
        given = [*(slopes[i] for i in moving), *(values[i] for i in kept), *held, w]
        return mlp_backward.bind(given, HiddenSpec(layers.second.product(), derivative))

    return hidden, [], through


def _activated(spec: GemmSpec, saved: Sequence[jax.Array]) -> jax.Array:
    """Returns the hidden layer for given pre-activations."""
    return reference.epilogue(saved, Operands(None, None), spec)[0]


def _full(tangent: jax.Array, y: jax.Array, spec: GemmSpec) -> jax.Array:
    """Returns the tangent of the residual over the whole result."""
    term = reference.over_result("c", Operands(None, None, c=tangent), spec, y.dtype)
    return jnp.broadcast_to(term, y.shape)
