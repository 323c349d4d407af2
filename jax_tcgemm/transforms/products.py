"""Classifies nodes of a graph: products, element-wise operations, reductions and comparisons."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jax_tcgemm._compat import jaxprs
from jax_tcgemm.epilogue import operations, rng
from jax_tcgemm.transforms.graph import Node, Value, inner_nodes
from jax_tcgemm.transforms.matrix_form import MatrixForm, RaggedForm, matrix_form, ragged_form

# Operations that return a value unchanged, but that mean something to XLA or to JAX;
# ``optimization_barrier`` may also take several values at once.
_APART = frozenset({"name", "optimization_barrier"})
ELEMENTWISE = operations.ELEMENTWISE - _APART
# Operations that make values of the product's shape without reading neighbouring elements.
SPREADING = frozenset({"broadcast_in_dim", "iota"})
DRAWING = rng.DRAWS
# XLA fuses these reductions with the operations that compute their operands.
REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min"})
# XLA fuses these operations, which read parts of a value, with its producer. Slices read no element
# twice; a gather may.
_SLICES = frozenset({"slice", "split"})
_PARTIAL = frozenset({"gather", "dynamic_slice"})

COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})

HALF_TYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


def is_product(item: Any) -> bool:
    """Returns true if an item is a 16-bit product that a kernel with an epilogue can compute."""
    if not isinstance(item, Node) or item.name not in ("dot_general", "ragged_dot_general"):
        return False
    lhs, rhs = item.inputs[:2]
    types = {x.aval.dtype for x in (lhs, rhs)}
    (result,) = item.outputs
    return (
        item.fallback_reason is None
        and item.stored is None
        and all(isinstance(x, Value) for x in (lhs, rhs))
        and is_on_device(item)
        and len(types) == 1
        and types.issubset(HALF_TYPES)
        and (result.dtype in types or result.dtype == jnp.float32)
        and all(isinstance(x, int) and x > 0 for value in (lhs, rhs) for x in value.shape)
    )


def form_of(product: Node) -> MatrixForm | RaggedForm | None:
    """Returns how this package computes a product with an epilogue, ``None`` if it cannot."""
    lhs, rhs = product.taken[:2]
    if is_typed(product):
        return None
    if product.name == "ragged_dot_general":
        form = ragged_form(product.params)
        return None if form is None or form.contracts_groups else form
    return matrix_form(lhs.shape, rhs.shape, product.params["dimension_numbers"])


def is_typed(node: Node) -> bool:
    """Returns true if an equation has an explicit result sharding, on a mesh with explicit axes."""
    params, explicit = node.params, jax.sharding.AxisType.Explicit
    for name in ("sharding", "out_sharding"):
        sharding = params.get(name)
        if sharding is not None and explicit in sharding.mesh.axis_types:
            return True
    return False


def reads_parts(item: Any, value: Value) -> bool:
    """Checks whether an item reads slices of a value, or less than half of it."""
    if not isinstance(item, Node) or item.name not in _SLICES | _PARTIAL:
        return False
    # The other inputs are indices.
    is_read = item.inputs[0] is value and not any(x is value for x in item.inputs[1:])
    made = sum(x.bytes for x in item.outputs)
    return is_read and (item.name in _SLICES or 2 * made < value.bytes)


def is_on_device(node: Node) -> bool:
    """Returns true if a node is computed on the device, not by the host."""
    return node.context[0] is None


def draws_as_usual(node: Node) -> bool:
    """Returns true if a node has the same ``threefry_partitionable`` setting as the lowering."""
    return node.context[1] == rng.partitionable()


def is_elementwise(item: Any) -> bool:
    """Returns true if each element of an item's one result depends on one element per input."""
    if not isinstance(item, Node):
        return False
    if item.elementwise is None:
        item.elementwise = _works_by_element(item)
    return item.elementwise


def _works_by_element(item: Node) -> bool:
    if item.has_effects or len(item.outputs) != 1:
        return False
    if _asks_for_equals(item.name, item.inputs):
        return False
    if item.name in jaxprs.CUSTOM_CALLS:
        inner = inner_nodes(item.eqn, jaxprs.CALLS)
        return all(_is_plain(eqn, item.outputs[0].shape) for eqn in inner)
    return item.name in ELEMENTWISE


def _is_plain(eqn: Any, shape: tuple[int, ...]) -> bool:
    """Checks if an equation inside a call is element-wise; its values may also be scalars."""
    name = eqn.primitive.name
    if name == "broadcast_in_dim":
        return math.prod(eqn.invars[0].aval.shape) == 1
    shapes = {x.aval.shape for x in (*eqn.invars, *eqn.outvars)}
    if _asks_for_equals(name, eqn.invars):
        return False
    return name in ELEMENTWISE and len(eqn.outvars) == 1 and shapes <= {shape, ()}


def compared(items: Iterable[Any]) -> frozenset[Value]:
    """Returns the values that are compared with other computed values.

    Such a value must not be computed twice. The gradient of a maximum tests which operand equals
    it, and sampling tests which logits reach the k-th largest one. A second computation may round
    in another place, and then no operand would be equal.
    """
    nodes = (x for x in items if isinstance(x, Node) and _compares(x.name, x.inputs, COMPARISONS))
    return frozenset(value for node in nodes for value in node.taken)


def _asks_for_equals(name: str, inputs: Sequence[Any]) -> bool:
    """Returns true if an operation compares two computed numbers for equality, see ``compared``."""
    return _compares(name, inputs, frozenset({"eq", "ne"}))


def _compares(name: str, inputs: Sequence[Any], names: frozenset[str]) -> bool:
    """Returns true if an operation has one of these names and compares two computed numbers."""
    return name in names and all(
        not isinstance(x, core.Literal) and jnp.issubdtype(x.aval.dtype, jnp.floating)
        for x in inputs
    )
