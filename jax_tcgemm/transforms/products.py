"""Nodes of a graph that are products, and nodes that work element by element."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jax_tcgemm._compat import jaxprs
from jax_tcgemm.epilogue import draws, operations
from jax_tcgemm.transforms.graph import Node, Value, inner_nodes
from jax_tcgemm.transforms.matrix_form import MatrixForm, RaggedForm, matrix_form, ragged_form

# What leaves a value as it is, but means something to others; and what takes several at once.
_APART = frozenset({"name", "optimization_barrier"})
ELEMENTWISE = operations.ELEMENTWISE - _APART
# What makes values of the product's shape of others, without a look at their neighbours.
SPREADING = frozenset({"broadcast_in_dim", "iota"})
DRAWING = draws.DRAWS
# What XLA computes of values that it makes on the way.
REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min"})
# XLA fuses these readers of parts with their producer. Slices read no element twice; a gather may.
_SLICES = frozenset({"slice", "split"})
_PARTIAL = frozenset({"gather", "dynamic_slice"})

COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})

HALF_TYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


def is_product(item: Any) -> bool:
    """Whether an item multiplies numbers of 16 bits, as a kernel with an epilogue can."""
    if not isinstance(item, Node) or item.name not in ("dot_general", "ragged_dot_general"):
        return False
    lhs, rhs = item.inputs[:2]
    types = {x.aval.dtype for x in (lhs, rhs)}
    (result,) = item.outputs
    return (
        item.fallback_reason is None
        and all(isinstance(x, Value) for x in (lhs, rhs))
        and is_on_device(item)
        and len(types) == 1
        and types.issubset(HALF_TYPES)
        and (result.dtype in types or result.dtype == jnp.float32)
        and all(isinstance(x, int) and x > 0 for value in (lhs, rhs) for x in value.shape)
    )


def form_of(product: Node) -> MatrixForm | RaggedForm | None:
    """Returns how this package computes a product with an epilogue, ``None`` where it cannot."""
    lhs, rhs = product.taken[:2]
    if is_typed(product):
        return None
    if product.name == "ragged_dot_general":
        form = ragged_form(product.params)
        return None if form is None or form.contracts_groups else form
    return matrix_form(lhs.shape, rhs.shape, product.params["dimension_numbers"])


def is_typed(node: Node) -> bool:
    """Whether an equation says how its result is sharded, on a mesh with explicit axes."""
    shardings = (node.params.get(name) for name in ("sharding", "out_sharding"))
    explicit = jax.sharding.AxisType.Explicit
    return any(x is not None and explicit in x.mesh.axis_types for x in shardings)


def reads_parts(item: Any, value: Value) -> bool:
    """Checks whether an item reads slices of a value, or less than half of it."""
    if not isinstance(item, Node) or item.name not in _SLICES | _PARTIAL:
        return False
    # The others say where.
    is_read = item.inputs[0] is value and not any(x is value for x in item.inputs[1:])
    made = sum(x.bytes for x in item.outputs)
    return is_read and (item.name in _SLICES or 2 * made < value.bytes)


def is_on_device(node: Node) -> bool:
    """Whether a node is not to be computed by the host."""
    return node.context[0] is None


def draws_as_usual(node: Node) -> bool:
    """Whether random numbers are counted as where the program is lowered."""
    return node.context[1] == draws.partitionable()


def is_elementwise(item: Any) -> bool:
    """Whether an item has one result, each element of which depends on those beside it."""
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
    """The same of an equation within a call, whose values may also be numbers that are spread."""
    name = eqn.primitive.name
    if name == "broadcast_in_dim":
        return math.prod(eqn.invars[0].aval.shape) == 1
    shapes = {x.aval.shape for x in (*eqn.invars, *eqn.outvars)}
    if _asks_for_equals(name, eqn.invars):
        return False
    return name in ELEMENTWISE and len(eqn.outvars) == 1 and shapes <= {shape, ()}


def compared(items: Iterable[Any]) -> frozenset[Value]:
    """Returns the values that are compared with other computed ones.

    Whoever makes such a value must be the only one. The gradient of a maximum asks which operand it
    is, and sampling which logits reach the k-th largest: an operand that is made a second time,
    rounded in another place, would be none of them.
    """
    nodes = (x for x in items if isinstance(x, Node) and _compares(x.name, x.inputs, COMPARISONS))
    return frozenset(value for node in nodes for value in node.taken)


def _asks_for_equals(name: str, inputs: Sequence[Any]) -> bool:
    """Whether two computed numbers are compared for equality, see ``compared``."""
    return _compares(name, inputs, frozenset({"eq", "ne"}))


def _compares(name: str, inputs: Sequence[Any], names: frozenset[str]) -> bool:
    """Whether an operation of one of these names has two operands that are computed numbers."""
    return name in names and all(
        not isinstance(x, core.Literal) and jnp.issubdtype(x.aval.dtype, jnp.floating)
        for x in inputs
    )
