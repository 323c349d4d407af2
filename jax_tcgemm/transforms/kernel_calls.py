"""Jaxprs of this package's primitives that compute a product or a region."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_tcgemm import _compat
from jax_tcgemm._compat import jaxprs
from jax_tcgemm.api import arguments
from jax_tcgemm.api import epilogue as epilogues
from jax_tcgemm.api.dot_general import dot_general
from jax_tcgemm.api.gated_gemm import gated_operands
from jax_tcgemm.api.gemm import gemm
from jax_tcgemm.api.ragged_dot import ragged_dot
from jax_tcgemm.epilogue import function as functions
from jax_tcgemm.epilogue import translation
from jax_tcgemm.epilogue.function import EpilogueFunction
from jax_tcgemm.epilogue.spec import CompiledSpec
from jax_tcgemm.lowering import jit_epilogue as compiled_lowering
from jax_tcgemm.lowering import jit_rows
from jax_tcgemm.primitives import gemm as gemm_primitive
from jax_tcgemm.primitives import jit_epilogue
from jax_tcgemm.problem import ragged
from jax_tcgemm.problem.spec import GemmSpec, flatten
from jax_tcgemm.problem.strides import Operands
from jax_tcgemm.transforms.fused import Fused
from jax_tcgemm.transforms.graph import Node, Value
from jax_tcgemm.transforms.matrix_form import MatrixForm, RaggedForm, ragged_form
from jax_tcgemm.transforms.products import HALF_TYPES, form_of, is_typed
from jax_tcgemm.transforms.region_function import literal, region_function, unfused_function


class NoKernelError(Exception):
    """No kernel supports this epilogue; the message says why."""


def traced(item: Node | Fused) -> Any:
    """Returns a closed jaxpr that computes a product or a region, see ``traced_call``.

    Raises:
        NoKernelError: no kernel supports the region's epilogue.
    """
    return traced_call(item, _region if isinstance(item, Fused) else _product)


def traced_call(item: Node | Fused, compute: Callable[[Any, list[Any]], Sequence[Any]]) -> Any:
    """Returns a closed jaxpr of an item's inputs, without those that are literals.

    Args:
        item: the item to compute.
        compute: returns the outputs of the item, given all of its inputs.
    """

    def function(*values: Any) -> Sequence[Any]:
        given = iter(values)
        inputs = [next(given) if isinstance(x, Value) else literal(x) for x in item.inputs]
        return compute(item, inputs)

    node = item.products[0] if isinstance(item, Fused) else item
    avals = [value.aval for value in item.taken]
    with jaxprs.in_context(node.eqn), jaxprs.on_mesh_of(avals):
        return jax.make_jaxpr(function)(*avals)


def _product(node: Node, values: Sequence[Any]) -> list[Any]:
    if node.stored is not None:
        return [node.stored.product(node, values)]
    if node.is_sequence_last:
        return [_with_sequence_last(node, *values)]
    if node.name == "dot_general":
        untyped = {} if is_typed(node) else {"out_sharding": None}
        return [dot_general(*values, **{**node.params, **untyped})]
    form = ragged_form(node.params)
    lhs, rhs, group_sizes = values
    if form is None or lhs.dtype not in HALF_TYPES or rhs.dtype != lhs.dtype:
        return jaxprs.bind_again(node.eqn, values, match=False)
    options = {
        "precision": node.params["precision"],
        "preferred_element_type": node.params["preferred_element_type"],
    }
    if not form.contracts_groups:
        return [ragged_dot(*values, transpose_rhs=form.transpose_rhs, **options)]
    # The gradient of the weights.
    precision = _compat.canonicalize_precision(node.params["precision"])
    spec = ragged.contraction(jnp.dtype(node.outputs[0].dtype), precision)
    return gemm_primitive.bind(Operands(lhs, rhs, group_sizes.astype(jnp.int32)), spec)


def _with_sequence_last(node: Node, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """Computes ``(batch, ..., sequence)`` and transposes it to ``(batch, sequence, ...)``."""
    form, (result,) = form_of(node), node.outputs
    assert isinstance(form, MatrixForm)
    a, b = form.factors(lhs, rhs)
    product = gemm(
        *(b, a),
        transpose_a=not form.transpose_b,
        transpose_b=True,
        precision=_compat.exchanged_precision(node.params["precision"]),
        preferred_element_type=result.dtype,
    )
    return lax.reshape(lax.transpose(product, (0, 2, 1)), result.shape)


def _region(fused: Fused, values: Sequence[Any]) -> Sequence[Any]:
    """Computes a region by one kernel."""
    if _is_wide_product(fused):
        (node,) = fused.products
        changes = {"preferred_element_type": jnp.dtype(jnp.float32), "out_sharding": None}
        return [dot_general(*values[:2], **{**node.params, **changes})]
    if _compat.is_sharded(*values):
        raise NoKernelError("a mesh with explicit axes")
    own, spec = _factors(fused, values[: fused.factors])
    shape = fused.accumulators[0].shape
    every, compiled_spec, _ = epilogues.traced(
        own, spec, shape, region_function(fused), values[fused.factors :], None
    )
    compiled_spec = compiled_spec.replace(unfused=_unfused(fused, compiled_spec))
    made = translation.translate(compiled_spec.function)
    if isinstance(made, str):
        raise NoKernelError(made)
    plan = compiled_lowering.planned(compiled_spec.split(every)[0], compiled_spec, made)
    if isinstance(plan, str):
        raise NoKernelError(plan)
    jit_rows.begin_compiling(plan, compiled_spec)
    return jit_epilogue.bind(every, compiled_spec)


def _unfused(fused: Fused, spec: CompiledSpec) -> EpilogueFunction | None:
    """Returns the region's own operations as ``CompiledSpec.unfused``."""
    if isinstance(fused.form, RaggedForm):
        return None
    count = len(fused.accumulators)
    avals = [value.aval for value in (*fused.accumulators, *fused.leaves)]
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
    function, held = functions.trace(unfused_function(fused), types, count)
    is_other = function.without_rules != spec.function.without_rules
    has_operands = function.types[count:] == spec.function.types[count:]
    return function if is_other and has_operands and not held else None


def _is_wide_product(fused: Fused) -> bool:
    """Returns true if a bfloat16 product is only converted to float32, so it need not be rounded.

    A float16 product must be rounded first: 70000 is infinite in float16.
    """
    names = [node.name for node in fused.nodes]
    return (
        names == ["convert_element_type"]
        and not isinstance(fused.form, RaggedForm)
        and [x.dtype for x in fused.outputs] == [jnp.float32]
        and fused.accumulators[0].dtype == jnp.bfloat16
    )


def _factors(fused: Fused, values: Sequence[Any]) -> tuple[Sequence[jax.Array], GemmSpec]:
    """Returns the operands of the product, or of both products of a gated one, and its spec."""
    form, params = fused.form, fused.products[0].params
    precision = _compat.canonicalize_precision(params["precision"])
    out_dtype = fused.products[0].outputs[0].dtype
    if isinstance(form, RaggedForm):
        lhs, rhs, group_sizes = values
        spec = ragged.dot(jnp.dtype(out_dtype), precision, transpose_b=form.transpose_rhs)
        return (lhs, rhs, group_sizes.astype(jnp.int32)), spec
    a, b = form.factors(*values[:2])
    if len(fused.products) == 2:
        _, b2 = form.factors(values[0], values[2])
        operands, spec = gated_operands(
            *(a, b, b2, None, None),
            transpose_w=form.transpose_b,
            precision=precision,
            preferred_element_type=out_dtype,
        )
        spec = spec.accumulators(config=None)
        return flatten(spec.select(operands)), spec
    batch, m, n, k = arguments.extents(a, b, form.transpose_a, form.transpose_b)
    (a, a_axes), (b, b_axes) = (
        arguments.placed(a, (*batch, m, k), form.transpose_a),
        arguments.placed(b, (*batch, k, n), form.transpose_b),
    )
    return (a, b), GemmSpec(Operands(a_axes, b_axes), jnp.dtype(out_dtype), precision)
