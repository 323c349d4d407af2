"""``mlp_tangent_p``: takes the tangent of a hidden layer through its epilogue and a product.

It is ``activation'(Z) * T @ W``, or ``(activation'(G) * U * TG + activation(G) * TU) @ W`` for a
gated layer, or the derivative of a user's function times ``W``. It is a primitive for the sake of
its transpose, which is one gemm. Its epilogue has the derivative of the activation, or the pullback
of the function with the sums that are the cotangents of the function's smaller operands. All other
rules are compositions of the parts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_tcgemm import _compat
from jax_tcgemm.epilogue import function as functions
from jax_tcgemm.epilogue import linear
from jax_tcgemm.epilogue.linear import LinearSpec
from jax_tcgemm.epilogue.spec import CompiledSpec
from jax_tcgemm.primitives import gemm as gemm_primitive
from jax_tcgemm.primitives import jit_epilogue, registration
from jax_tcgemm.primitives.epilogue_derivative import activation_tangent
from jax_tcgemm.primitives.gated import product_tangent
from jax_tcgemm.problem.arithmetic import accumulator_dtype
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Operands, insert_batches

mlp_tangent_p = Primitive("tcgemm_hidden_tangent")


@dataclasses.dataclass(frozen=True)
class HiddenSpec:
    """The static parameters.

    Attributes:
        product: the product of the hidden layer's tangent and ``w``. With a named activation, its
            epilogue is the ``"derivative"`` or ``"gated_derivative"`` that the transpose computes.
        function: the derivative of the hidden layer if its epilogue is a function.
    """

    product: GemmSpec
    function: LinearSpec | None = None

    @property
    def slopes(self) -> int:
        """Number of operands in which the result is linear."""
        return self.product.result_count if self.function is None else self.function.slopes

    @property
    def without_rules(self) -> HiddenSpec:
        """The same without custom derivatives: see ``EpilogueFunction.without_rules``."""
        function = self.function and self.function.without_rules
        return dataclasses.replace(self, function=function)


def bind(operands: Sequence[jax.Array], spec: HiddenSpec) -> jax.Array:
    """Applies the primitive.

    Args:
        operands: the tangents, the values at which they are taken, and ``w``. With a named
            activation, the tangents are those of the pre-activations, and the values are the
            pre-activations, ``[z]`` or ``[g, u]``, each ``(*batch, m, k)``. With a function, they
            are the operands of ``spec.function.tangent``. The axes of ``w`` have any order.
        spec: the static parameters.

    Returns:
        ``(*batch, m, n)``.
    """
    return registration.bind(mlp_tangent_p, operands, spec, _composed)


def _composed(*operands: jax.Array, spec: HiddenSpec, is_lowered: bool = False) -> jax.Array:
    *given, w = operands
    if spec.function is None:
        tangents, saved = given[: spec.slopes], given[spec.slopes :]
        of_activation = product_tangent if spec.slopes == 2 else activation_tangent
        tangent = of_activation(spec.product.activation, *saved, *tangents)
    else:
        function = spec.function.tangent
        (tangent,) = (function.computed if is_lowered else function)(*given)
    return gemm_primitive.bind(Operands(tangent, w), spec.product.linear())[0]


# Abstract evaluation


def _abstract_eval(*avals: Any, spec: HiddenSpec) -> Any:
    hidden = avals[0].shape if spec.function is None else spec.function.shape
    shape = spec.product.result_shape(Operands(hidden, avals[-1].shape))
    return _compat.result_aval(avals, shape, spec.product.out_dtype)


# Transposition


def _transpose(cotangent: Any, *operands: Any, spec: HiddenSpec) -> list[Any]:
    *given, w = operands
    slopes, values = given[: spec.slopes], given[spec.slopes :]
    wanted = [ad.is_undefined_primal(x) for x in slopes]
    assert any(wanted), "linear in the tangents of the hidden layer alone"
    if type(cotangent) is ad.Zero:
        return [None] * len(operands)
    dense = tuple(range(spec.product.batch_ndim + 2))
    *batch, rows, columns = spec.product.axes.b
    product = spec.product.replace(axes=Operands(dense, (*batch, columns, rows)))
    x = Operands(cotangent, w)
    if spec.function is None:
        dtype = next(x.aval.dtype for x in slopes if ad.is_undefined_primal(x))
        found = _through_activation(x, values, product.replace(out_dtype=dtype))
    else:
        found = _through_function(x, values, product, spec.function, wanted)
    results = linear.of_wanted(found, wanted)
    return [*results, *[None] * (len(operands) - len(results))]


def _through_activation(
    x: Operands, saved: Sequence[jax.Array], product: GemmSpec
) -> list[jax.Array]:
    if product.activation is None and len(saved) == 1:
        return gemm_primitive.bind(x, product.linear())
    names = ("c", "c2")[: len(saved)]
    axes = product.axes._replace(**dict.fromkeys(names, product.axes.a))
    x = x._replace(**dict(zip(names, saved, strict=True)))
    return gemm_primitive.bind(x, product.replace(axes=axes))


def _through_function(
    x: Operands,
    values: Sequence[jax.Array],
    product: GemmSpec,
    derivative: LinearSpec,
    wanted: Sequence[bool],
) -> list[jax.Array]:
    if not all(wanted) and not derivative.has_opaque_rule:
        derivative, kept = derivative.of_slopes(wanted)
        values = [values[i] for i in kept]
    (hidden,) = derivative.tangent.results
    wide = accumulator_dtype(x.a.dtype, x.b.dtype, hidden.dtype)
    function, held = _of_accumulator(derivative, wide)
    spec = CompiledSpec(product.replace(out_dtype=jnp.dtype(hidden.dtype)), function)
    return jit_epilogue.bind([x.a, x.b, *values, *held], spec)


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


# Batching


def _batch(
    axis_data: Any, operands: Sequence[Any], dims: Sequence[int | None], *, spec: HiddenSpec
) -> tuple[jax.Array, int]:
    """Adds an outermost batch dimension, which all matrices of the hidden layer have."""
    if spec.function is not None:
        composed = functools.partial(_composed, spec=spec)
        return jax.vmap(composed, tuple(dims), axis_size=axis_data.size)(*operands), 0
    *hidden, w = operands
    *hidden_dims, w_dim = dims
    hidden = [
        batching.bdim_at_front(x, d, axis_data.size, axis_data.explicit_mesh_axis)
        for x, d in zip(hidden, hidden_dims, strict=True)
    ]
    product = spec.product
    axes = insert_batches(Operands(product.axes.a, product.axes.b), Operands(0, w_dim))
    return bind([*hidden, w], HiddenSpec(product.replace(axes=axes))), 0


# Registration

registration.evaluate_by_jit(mlp_tangent_p, lambda spec: spec.without_rules)
mlp_tangent_p.def_abstract_eval(_abstract_eval)
# The primitive is linear in the tangents of the layer; their tangents are tangents of tangents.
registration.derive_linear(mlp_tangent_p, _composed, lambda spec: spec.slopes)
ad.primitive_transposes[mlp_tangent_p] = _transpose
registration.batch(mlp_tangent_p, _batch)
_lowered = functools.partial(_composed, is_lowered=True)
mlir.register_lowering(mlp_tangent_p, mlir.lower_fun(_lowered, multiple_results=False))
