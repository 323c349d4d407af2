"""Products whose weight the program dequantizes: ``x @ ((q - zero) * scale)``.

``q``, ``zero`` and ``scale`` are in memory: arguments or constants of the program, or of the body
of a loop. ``q`` is int4 or uint4. Conversions, reshapes, transposes and broadcasts may lie between
them and the product. If the product has few rows and a large weight, the program packs ``q`` and
multiplies it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm.api.dot_general import dot_general
from jax_tcgemm.api.packed_dot_general import multiplied_weight
from jax_tcgemm.lowering.unpacked import LEAST_VALUES
from jax_tcgemm.problem.packed import BITS
from jax_tcgemm.quantized.arrays import Quantized
from jax_tcgemm.transforms.graph import Atom, Node, Value
from jax_tcgemm.transforms.products import HALF_TYPES, is_on_device, is_typed
from jax_tcgemm.transforms.spread import Spread

# Types of the stored values.
_STORED = frozenset(jnp.dtype(name) for name, bits in BITS.items() if bits == 4)
# At most this many operations between a product and a stored value are followed.
_MOST_FOLLOWED = 40


@dataclasses.dataclass(frozen=True)
class Weight:
    """How a product's operand, ``(k, n)`` or ``(n, k)``, is made of stored arrays.

    Attributes:
        dtype: name of the dtype of the stored values.
        side: the number of the operand.
        k_axis: the contracted axis.
        values: the spread of the stored values.
        scale: that of the scale; ``None`` without one.
        zero: that of the zero point; ``None`` without one.
    """

    dtype: str
    side: int
    k_axis: int
    values: Spread
    scale: Spread | None
    zero: Spread | None

    @property
    def reason(self) -> str:
        """The reason in the report why a kernel computes the product."""
        return f"packs the stored {self.dtype} weight and multiplies it"

    def product(self, node: Node, values: Sequence[Any]) -> jax.Array:
        """Computes the product.

        Args:
            node: the product.
            values: the values of its inputs.
        """
        operands = list(values[:2])
        operands[self.side] = self.quantized(values)
        precision, dtype = node.params["precision"], node.outputs[0].dtype
        return dot_general(operands[0], operands[1], self.dimensions(node), precision, dtype)

    @property
    def is_turned(self) -> bool:
        """True if the first axis of the operand is contiguous in memory, and not the second."""
        first, second = self.values.axes
        return not any(stride == 1 for _, stride in second) and bool(first) and first[-1][1] == 1

    def dimensions(self, node: Node) -> Any:
        """Returns the dimension numbers of the product with ``quantized``."""
        contracted = list(node.params["dimension_numbers"][0])
        contracted[self.side] = (1 - self.k_axis if self.is_turned else self.k_axis,)
        return tuple(contracted), ((), ())

    def quantized(self, values: Sequence[Any]) -> Quantized:
        """Returns the operand, with its axes in the order of the memory.

        Args:
            values: the values of the product's inputs.
        """

        def ordered(spread: Spread, x: Any) -> jax.Array:
            return (Spread(spread.axes[::-1]) if self.is_turned else spread).applied(x)

        others = list(values[2:])
        stored = ordered(self.values, values[self.side])
        scale = jnp.ones((1, 1), jnp.float32)
        if self.scale is not None:
            scale = ordered(self.scale, others.pop(0))
        return Quantized(
            stored, scale, None if self.zero is None else ordered(self.zero, others[0])
        )

    def is_slow_after(self, x: Atom) -> bool:
        """Checks if XLA dequantizes in less time for its own kernel than for one of this package.

        XLA then writes the weight transposed, which is faster than by rows (measured from 512 rows
        on, lab/packed_weights.md).

        Args:
            x: the other operand.
        """
        is_by_rows = self.is_turned != (self.k_axis == 0)
        size = math.prod(self.values.shape)
        return is_by_rows and size >= LEAST_VALUES and size >= x.aval.size


@dataclasses.dataclass(frozen=True)
class _Chain:
    """Stored values and their spreads over a value that the program computes from them."""

    values: tuple[Value, Spread]
    scale: tuple[Value, Spread] | None = None
    zero: tuple[Value, Spread] | None = None

    @property
    def parts(self) -> list[tuple[Value, Spread]]:
        every = (self.values, self.scale, self.zero)
        return [part for part in every if part is not None]

    def after(self, node: Node) -> _Chain | None:
        """Returns the chain after an operation that moves elements."""
        moved: list[Any] = []
        for part in (self.values, self.scale, self.zero):
            spread = None if part is None else part[1].after(node)
            if part is not None and spread is None:
                return None
            moved.append(None if part is None else (part[0], spread))
        return _Chain(*moved)


class _Search:
    """Follows values back to stored ones.

    Attributes:
        makers: the item that computes each value; stored values have none.
        context: that of the product, which all operations must share.
        left: number of operations that may still be followed.
    """

    def __init__(self, makers: Mapping[Value, Any], context: Any):
        self.makers, self.context, self.left = makers, context, _MOST_FOLLOWED

    def maker(self, value: Value) -> Node | None:
        """Returns the operation that computes a value, if it may be followed."""
        node = self.makers.get(value)
        self.left -= 1
        if not isinstance(node, Node) or len(node.outputs) != 1 or node.has_effects:
            return None
        if not node.inputs:  # such as iota
            return None
        return node if self.left > 0 and node.context == self.context else None

    def chain(self, value: Atom) -> _Chain | None:
        """Returns how a value is dequantized; ``None`` if it is not."""
        if not isinstance(value, Value):
            return None
        if value not in self.makers:
            return _Chain((value, Spread.of(value.shape))) if _has_few_bits(value) else None
        node = self.maker(value)
        if node is None or is_typed(node):
            return None
        if node.name in ("mul", "sub"):
            return self.combined(node)
        if not isinstance(node.inputs[0], Value) or node.name == "broadcast_in_dim":
            return None
        if node.name == "convert_element_type" and not _keeps(*_dtypes(node)):
            return None
        found = self.chain(node.inputs[0])
        return None if found is None else found.after(node)

    def combined(self, node: Node) -> _Chain | None:
        """Returns a chain after its zero point is subtracted or its scale is multiplied."""
        for i in (0, 1) if node.name == "mul" else (0,):
            found, other = self.chain(node.inputs[i]), self.spread(node.inputs[1 - i])
            if found is None or other is None or found.scale is not None:
                continue
            if found.values[1].shape != node.outputs[0].shape:
                continue
            other = other[0], other[1].broadcast(node.outputs[0].shape)
            is_integer = jnp.issubdtype(_dtype(other[0]), jnp.integer)
            if node.name == "mul" and not is_integer:
                return dataclasses.replace(found, scale=other)
            types = [_dtype(x) for x in (found.values[0], other[0])]
            is_zero = is_integer and jnp.issubdtype(types[0], jnp.integer) and found.zero is None
            if (
                node.name == "sub"
                and is_zero
                and _holds_difference(_dtype(node.outputs[0]), *types)
            ):
                return dataclasses.replace(found, zero=other)
        return None

    def spread(self, value: Atom) -> tuple[Value, Spread] | None:
        """Returns the stored array that a value repeats, and how it is spread."""
        if not isinstance(value, Value) or not all(isinstance(n, int) for n in value.shape):
            return None
        if value not in self.makers:
            return value, Spread.of(value.shape)
        node = self.maker(value)
        if node is None or is_typed(node):
            return None
        is_kept = node.name != "convert_element_type" or _keeps(*_dtypes(node))
        found = self.spread(node.inputs[0]) if is_kept else None
        if found is None:
            return None
        after = found[1].after(node)
        return None if after is None else (found[0], after)


def _keeps(source: np.dtype, target: np.dtype) -> bool:
    """Checks if a conversion keeps all numbers, up to the rounding of floating-point numbers."""
    if jnp.issubdtype(target, jnp.floating):
        is_wider = not jnp.issubdtype(source, jnp.floating) or (
            jnp.finfo(source).maxexp <= jnp.finfo(target).maxexp
        )
        return target.itemsize > 1 and is_wider
    if not all(jnp.issubdtype(x, jnp.integer) for x in (source, target)):
        return False
    own, other = jnp.iinfo(source), jnp.iinfo(target)
    return other.min <= own.min and own.max <= other.max


def _holds_difference(target: np.dtype, *sources: np.dtype) -> bool:
    """Checks if a type holds the differences of all numbers of these integer types."""
    if jnp.issubdtype(target, jnp.floating):
        return True
    most = max(jnp.iinfo(x).bits for x in sources)
    return jnp.issubdtype(target, jnp.signedinteger) and jnp.iinfo(target).bits > most


def _has_few_bits(value: Value) -> bool:
    """Checks if the type of a value is one of those of stored values."""
    return value.dtype in _STORED


def _dtype(atom: Atom) -> np.dtype:
    return jnp.dtype(atom.aval.dtype)


def _dtypes(conversion: Node) -> tuple[np.dtype, np.dtype]:
    return _dtype(conversion.inputs[0]), _dtype(conversion.outputs[0])


def with_stored_weights(items: Iterable[Any]) -> list[Any]:
    """Returns the items; products that pack a stored weight have it as an input.

    Sets ``plain_reason`` of others with stored weights that XLA dequantizes in less time.
    """
    items = list(items)
    makers = {value: item for item in items for value in item.outputs}
    inputs = (value for item in items for value in item.taken)
    if not any(_has_few_bits(value) and value not in makers for value in inputs):
        return items
    return [_with_stored_weight(item, makers) for item in items]


def _with_stored_weight(item: Any, makers: Mapping[Value, Any]) -> Any:
    for side in (1, 0):
        found = weight_of(item, side, makers)
        if found is None:
            continue
        weight, inputs = found
        if _is_packed(item, weight, inputs):
            return Node(item.eqn, inputs, item.outputs, item.scope, stored=weight)
        if weight.is_slow_after(item.inputs[1 - side]):
            item.plain_reason = (
                f"XLA dequantizes the {weight.dtype} weight in the order that its kernel reads"
            )
    return item


def _is_packed(product: Node, weight: Weight, inputs: Sequence[Atom]) -> bool:
    """Checks if the program should pack a weight, by the types alone."""
    types = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in inputs]
    operands: list[Any] = types[:2]
    operands[weight.side] = jax.eval_shape(lambda *values: weight.quantized(values), *types)
    precision, dtype = product.params["precision"], product.outputs[0].dtype
    dims = weight.dimensions(product)
    return multiplied_weight(operands[0], operands[1], dims, precision, dtype) is not None


def weight_of(
    item: Any, side: int, makers: Mapping[Value, Any]
) -> tuple[Weight, tuple[Atom, ...]] | None:
    """Returns the stored weight that makes one operand of a product.

    Args:
        item: any item of a graph.
        side: the number of the operand.
        makers: the item that computes each value.

    Returns:
        The weight, and the operands of the product with the stored values in the place of the
        operand, followed by the scale and the zero point if there are any. ``None`` if the item is
        no product of activations and a dequantized matrix.
    """
    if not isinstance(item, Node) or item.name != "dot_general":
        return None
    operand, x = item.inputs[side], item.inputs[1 - side]
    contracted, (batch, _) = item.params["dimension_numbers"]
    is_matrix = not batch and len(contracted[side]) == 1 and len(operand.aval.shape) == 2
    if not is_matrix or operand not in makers or not is_on_device(item) or is_typed(item):
        return None
    shapes = (*operand.aval.shape, *x.aval.shape)
    if x.aval.dtype not in HALF_TYPES or operand.aval.dtype != x.aval.dtype:
        return None
    if not all(isinstance(n, int) and n > 0 for n in shapes):
        return None
    chain = _Search(makers, item.context).chain(operand)
    if chain is None or not all(spread.is_in_blocks for _, spread in chain.parts):
        return None
    (values, spread), *others = chain.parts
    scale, zero = (None if part is None else part[1] for part in (chain.scale, chain.zero))
    weight = Weight(_dtype(values).name, side, contracted[side][0], spread, scale, zero)
    inputs = [x, x]
    inputs[side] = values
    return weight, (*inputs, *(value for value, _ in others))
