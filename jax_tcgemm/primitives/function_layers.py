"""Two layers, the first with a user's function as its epilogue.

The rules are like those of ``layers.py`` and ``mlp_backward.py``: the tangent of the
hidden layer goes into the second product as one linear primitive, whose transpose is one gemm. The
epilogue of that gemm is the pullback of the function, with the sums that are the cotangents of the
function's smaller operands.
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
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_tcgemm import _compat
from jax_tcgemm.epilogue import function as functions
from jax_tcgemm.epilogue import linear
from jax_tcgemm.epilogue.linear import LinearSpec
from jax_tcgemm.epilogue.spec import CompiledSpec
from jax_tcgemm.lowering import reference
from jax_tcgemm.primitives import gemm as gemm_primitive
from jax_tcgemm.primitives import jit_epilogue, registration
from jax_tcgemm.primitives.gemm import ACTIVATION
from jax_tcgemm.primitives.tangents import linear_tangents
from jax_tcgemm.problem.arithmetic import accumulator_dtype
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Operands

function_tangent_p = Primitive("tcgemm_function_hidden_tangent")


@dataclasses.dataclass(frozen=True)
class FunctionLayers:
    """The static parameters of both layers; the first has one result."""

    first: CompiledSpec
    second: GemmSpec


@dataclasses.dataclass(frozen=True)
class HiddenSpec:
    """The static parameters of the tangent of a hidden layer, and of a product.

    Attributes:
        derivative: derivative of the hidden layer.
        product: product of the hidden layer and ``w``, without an epilogue.
    """

    derivative: LinearSpec
    product: GemmSpec

    @property
    def without_rules(self) -> HiddenSpec:
        """The same without custom derivatives: see ``EpilogueFunction.without_rules``."""
        return dataclasses.replace(self, derivative=self.derivative.without_rules)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def forward(layers: FunctionLayers, first: Sequence[Any], second: Operands) -> jax.Array:
    """Computes both layers.

    Args:
        layers: the static parameters.
        first: the operands of the first layer.
        second: the operands of the second layer; ``a`` is None and becomes the hidden layer.
    """
    (hidden,) = jit_epilogue.bind(first, layers.first)
    return gemm_primitive.bind(second._replace(a=hidden), layers.second)[0]


def _jvp(
    layers: FunctionLayers,
    primals: tuple[Sequence[Any], Operands],
    tangents: tuple[Sequence[Any], Operands],
) -> tuple[jax.Array, jax.Array]:
    """Derives ``y = h @ w + bias + c`` by ``y' = h' @ w + h @ w' + bias' + c'``."""
    first, second = primals
    d_first, d_second = ([_or_none(t) for t in each] for each in tangents)
    d_second = Operands(*d_second)
    (hidden,), values, slopes = jit_epilogue.with_slopes(first, d_first, layers.first)
    y = gemm_primitive.bind(second._replace(a=hidden), layers.second)[0]
    addends = []
    if d_second.c is not None:
        term = reference.over_result(
            "c", Operands(None, None, c=d_second.c), layers.second, y.dtype
        )
        addends.append(jnp.broadcast_to(term, y.shape))
    moving = [i for i, slope in enumerate(slopes) if slope is not None]
    if moving:
        wide = jit_epilogue.accumulators_dtype(first, layers.first)
        derivative, kept, held = linear.of_epilogue(layers.first.function, wide, values, moving)
        given = [*(slopes[i] for i in moving), *(values[i] for i in kept), *held, second.b]
        addends.append(_bind(given, HiddenSpec(derivative, layers.second.product())))
    tangent: Any = sum(addends[1:], addends[0]) if addends else jnp.zeros_like(y)
    if d_second.b is not None or d_second.bias is not None:
        # C passes its cotangent on unchanged.
        dx = Operands(None, d_second.b, c=tangent if addends else None, bias=d_second.bias)
        axes = layers.second.axes._replace(c=tuple(range(hidden.ndim)))
        x = Operands(checkpoint_name(hidden, ACTIVATION), second.b)
        tangent = linear_tangents(x, dx, layers.second.replace(axes=axes), gemm_primitive.bind)[0]
    return y, _compat.typed_as(y, tangent)


forward.defjvp(_jvp, symbolic_zeros=True)


def _or_none(tangent: Any) -> Any:
    return None if isinstance(tangent, SymbolicZero) else tangent


def _bind(operands: Sequence[Any], spec: HiddenSpec) -> jax.Array:
    return registration.bind(function_tangent_p, operands, spec, _composed)


def _composed(*operands: Any, spec: HiddenSpec) -> jax.Array:
    *given, w = operands
    (tangent,) = spec.derivative.tangent(*given)
    return gemm_primitive.bind(Operands(tangent, w), spec.product.linear())[0]


def _computed(*operands: Any, spec: HiddenSpec) -> jax.Array:
    """Does the same when a program is lowered."""
    *given, w = operands
    (tangent,) = spec.derivative.tangent.computed(*given)
    return gemm_primitive.bind(Operands(tangent, w), spec.product.linear())[0]


def _abstract_eval(*avals: Any, spec: HiddenSpec) -> Any:
    shape = spec.product.result_shape(Operands(spec.derivative.shape, avals[-1].shape))
    return _compat.result_aval(avals, shape, spec.product.out_dtype)


def _transpose(cotangent: Any, *operands: Any, spec: HiddenSpec) -> list[Any]:
    derivative = spec.derivative
    *given, w = operands
    slopes, values = given[: derivative.slopes], given[derivative.slopes :]
    wanted = [ad.is_undefined_primal(x) for x in slopes]
    if type(cotangent) is ad.Zero:
        return [None] * len(operands)
    if not all(wanted) and not derivative.has_opaque_rule:
        derivative, kept = derivative.of_slopes(wanted)
        values = [values[i] for i in kept]
    dense = tuple(range(spec.product.batch_ndim + 2))
    *batch, rows, columns = spec.product.axes.b
    axes = Operands(dense, (*batch, columns, rows))
    (hidden,) = derivative.tangent.results
    product = spec.product.replace(axes=axes, out_dtype=jnp.dtype(hidden.dtype))
    function, held = _of_accumulator(
        derivative, accumulator_dtype(cotangent.dtype, w.dtype, hidden.dtype)
    )
    found = jit_epilogue.bind([cotangent, w, *values, *held], CompiledSpec(product, function))
    results = linear.of_wanted(found, wanted)
    return [*results, *[None] * (len(operands) - len(results))]


def _of_accumulator(
    derivative: LinearSpec, wide: Any
) -> tuple[functions.EpilogueFunction, list[Any]]:
    """Returns the pullback of a hidden layer as an epilogue, and its last operands.

    The accumulator of that epilogue is the product that is the layer's cotangent. The last operands
    are arrays that a backward rule closes over.
    """
    pullback, held = derivative.transposed()
    cotangent, *values = pullback.jaxpr.in_avals

    def of_product(product: jax.Array, *values: Any) -> list[jax.Array]:
        return pullback(product.astype(cotangent.dtype), *values)

    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (cotangent, *values)]
    types[0] = jax.ShapeDtypeStruct(cotangent.shape, wide)
    function, _ = functions.trace(of_product, types, 1)
    return function, held


def _batch(
    axis_data: Any, operands: Sequence[Any], dims: Sequence[int | None], *, spec: HiddenSpec
) -> tuple[jax.Array, int | None]:
    if all(dim is None for dim in dims):
        return _bind(operands, spec), None
    composed = functools.partial(_composed, spec=spec)
    return jax.vmap(composed, tuple(dims), axis_size=axis_data.size)(*operands), 0


registration.evaluate_by_jit(function_tangent_p, lambda spec: spec.without_rules)
function_tangent_p.def_abstract_eval(_abstract_eval)
registration.derive_linear(function_tangent_p, _composed, lambda spec: spec.derivative.slopes)
ad.primitive_transposes[function_tangent_p] = _transpose
batching.fancy_primitive_batchers[function_tangent_p] = _batch
mlir.register_lowering(function_tangent_p, mlir.lower_fun(_computed, multiple_results=False))
