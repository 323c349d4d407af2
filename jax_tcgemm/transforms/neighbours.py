"""Decides by the operations around a product whether XLA should compute it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from jax_tcgemm._compat import jaxprs
from jax_tcgemm.problem.arithmetic import INPUT_DTYPES, resolve_algorithm
from jax_tcgemm.transforms.graph import Atom, Node, Value
from jax_tcgemm.transforms.products import HALF_TYPES, SPREADING, is_elementwise, is_typed

_Dims = tuple[int, ...]

# A product of at most this many rows or columns takes about as long as reading the other operand.
_FEW = 64
# A product of few rows with fewer bytes takes about as long as a launch. XLA's own kernel is not
# slower. XLA may also add up its partial sums in the next kernel, and updates it sooner in a
# command buffer. Several products of an operand with fewer bytes take about as long as one.
_SMALL_BYTES = 4 * 2**20
# XLA's kernels are as fast as those of this package if both extents of a weight are multiples of
# this. XLA also adds up partial sums in the next kernel.
_WHOLE = 128
# XLA merges products that share an operand if one of the products is no larger than this.
_JOINED_BYTES = 32 * 2**20
# The search for a product before an operand visits at most this many operations.
_MOST_LOOKED_AT = 50
_PARTS = "few rows: XLA adds up parts of k in the kernel that follows"
_JOINED = "few rows, and XLA joins it with another product of the same operand"
_LITTLE = "few bytes, and XLA joins it with another product of the same operand"
# Reasons that do not hold if a kernel reads two weights at once.
_OF_NEIGHBOURS = frozenset({_PARTS, _JOINED})
# Kernels read rows of multiples of this many bytes.
_ROW_BYTES = 16
# Operations that XLA fuses into its own product, in addition to element-wise ones.
_FUSIBLE = SPREADING | {"transpose", "slice", "dynamic_slice", "rev", "pad", "concatenate"}


def note_fallbacks(items: Iterable[Any], sliced: Collection[Value]) -> None:
    """Sets the reason of each product that XLA should compute, or should if it has no epilogue.

    Args:
        items: those of a graph.
        sliced: values that XLA slices out of a larger array for each turn of a loop, such as the
            weights of layers, or the inputs of a recurrent network; and their views. XLA copies a
            slice for its own kernels for few rows, but passes its address to a kernel of this
            package.
    """
    items = list(items)
    makers = {value: item for item in items for value in item.outputs}
    users, siblings = users_of(items), _Siblings(items)
    for item in items:
        reason = _fallback_reason(item, makers, users, siblings, sliced)
        if reason in _OF_NEIGHBOURS and _is_gated(item, users):
            item.single_reason = reason
        elif reason == _LITTLE:
            item.plain_reason = reason
        else:
            item.fallback_reason = reason


def _fallback_reason(
    product: Node,
    makers: Mapping[Value, Any],
    users: Mapping[Value, Sequence[Any]],
    siblings: _Siblings,
    sliced: Collection[Value],
) -> str | None:
    """Returns why XLA should compute a product with its neighbours; ``None`` if it should not.

    Args:
        product: any node of a graph.
        makers: the item that computes each value; arguments and constants have none.
        users: the items that read each value.
        siblings: the products that share operands.
        sliced: as for ``note_fallbacks``.
    """
    if product.name != "dot_general" or product.stored is not None:
        return None
    (contracted, _), (batch, _) = product.params["dimension_numbers"]
    if batch:
        if _shares_rounded(product, users):
            return None
        return "a batch of products: XLA chooses the layouts of its operands"
    lhs, rhs = (x.aval.shape for x in product.inputs)
    if not all(isinstance(extent, int) for extent in (*lhs, *rhs)):
        return None
    k = math.prod(lhs[i] for i in contracted)
    m, n = (math.prod(shape) // max(k, 1) for shape in (lhs, rhs))
    if k <= 1 or m == n == 1:
        return "an outer product, or a single sum"
    if min(m, n) <= _FEW:
        larger = max(product.inputs, key=lambda x: math.prod(x.aval.shape))
        maker = _maker(larger, makers)
        is_small = 0 < _size(product) < _SMALL_BYTES
        if isinstance(larger, Value) and larger in sliced and not is_small:
            return None
        if _is_fusible(maker) and not _follows_product(larger, makers):
            return f"few rows, and XLA fuses {maker.name}, which makes the other operand"
        if is_small:
            return "few rows or columns, and few bytes: a launch takes as long"
        if min(m, n) == 1:
            return None
        is_whole = k % _WHOLE == max(m, n) % _WHOLE == 0
        if maker is None and is_whole and larger.aval.dtype in HALF_TYPES:
            return _PARTS
        if siblings.has(product):
            return _JOINED
    if 0 < _size(product) < _SMALL_BYTES and siblings.has(product):
        return _LITTLE
    return None


def _shares_rounded(product: Node, users: Mapping[Value, Sequence[Any]]) -> bool:
    """Returns true if other products round the same large operand to a narrower type.

    An example is the cotangent of the scores in ``jax.nn.dot_product_attention``. XLA rounds the
    operand in each product, and therefore writes and reads it wide. Operands of a kernel are
    written narrow, by the operation that makes them.
    """
    operand = max(product.inputs, key=lambda x: x.bytes if isinstance(x, Value) else 0)
    readers = [x for x in users.get(operand, ()) if x.name == "dot_general"]
    return len(readers) > 1 and all(_rounds(reader, operand) for reader in readers)


def _rounds(product: Node, operand: Value) -> bool:
    """Returns true if the precision of a product names a type narrower than an operand's."""
    a, b, out = (x.aval.dtype for x in (*product.inputs, *product.outputs))
    name = resolve_algorithm(a, b, out, product.params["precision"])
    return name is not None and INPUT_DTYPES[name].itemsize < operand.aval.dtype.itemsize


class _Siblings:
    """Products that share an operand and that XLA may join, like q, k and v of a layer."""

    def __init__(self, items: Iterable[Any]):
        self._sizes: dict[Any, list[int]] = {}
        for item in items:
            if is_plain_product(item):
                for side, value in enumerate(item.inputs):
                    if isinstance(value, Value):
                        self._sizes.setdefault(_shared(item, side), []).append(_size(item))

    def has(self, product: Node) -> bool:
        """Returns true if another product also reads the smaller operand.

        Callers skip this check for one row: two kernels of this package are faster than XLA's.
        """
        if not all(isinstance(x, Value) for x in product.inputs):
            return False
        side = int(product.inputs[1].bytes < product.inputs[0].bytes)
        sizes = self._sizes.get(_shared(product, side), ())
        return len(sizes) > 1 and min(sizes) <= _JOINED_BYTES


def _shared(product: Node, side: int) -> Any:
    """Returns what products that XLA may join for this operand have in common."""
    return product.inputs[side], side, product.context, product.params["dimension_numbers"]


def _is_gated(product: Node, users: Mapping[Value, Sequence[Any]]) -> bool:
    """Returns true if another product of the same left operand meets this one, as in a gated layer.

    One kernel of this package may then read both weights, if the right operand is the larger one.
    """
    shared, weight = product.inputs
    own = product.outputs[0]
    if not isinstance(shared, Value) or shared.bytes >= weight.bytes:
        return False
    rows = [x.aval.shape[-1] * x.aval.dtype.itemsize for x in product.inputs]
    if weight.aval.dtype not in HALF_TYPES or any(each % _ROW_BYTES for each in rows):
        return False
    reached = _elementwise_after(own, users)
    return any(
        user is not product
        and is_plain_product(user)
        and user.inputs[0] is shared
        and user.context == product.context
        and user.params["dimension_numbers"] == product.params["dimension_numbers"]
        and user.outputs[0].aval.shape == own.aval.shape
        and not reached.isdisjoint(_elementwise_after(user.outputs[0], users))
        for user in users.get(shared, ())
    )


def _elementwise_after(value: Value, users: Mapping[Value, Sequence[Any]]) -> set[Any]:
    """Returns element-wise operations that follow from a value, at most ``_MOST_LOOKED_AT``."""
    waiting, found = [value], set()
    while waiting and len(found) < _MOST_LOOKED_AT:
        for item in users.get(waiting.pop(), ()):
            if isinstance(item, Node) and is_elementwise(item) and item not in found:
                found.add(item)
                waiting += item.outputs
    return found


def _size(product: Node) -> int:
    """Returns the bytes of the operands and the result."""
    return sum(x.bytes for x in (*product.taken, *product.outputs))


def _is_fusible(maker: Any) -> bool:
    return isinstance(maker, Node) and (maker.name in _FUSIBLE or is_elementwise(maker))


def _follows_product(atom: Atom, makers: Mapping[Value, Any]) -> bool:
    """Returns true if a value follows from a product, whose kernel may then compute the value."""
    waiting, seen = [atom], set()
    while waiting and len(seen) < _MOST_LOOKED_AT:
        maker = _maker(waiting.pop(), makers)
        if isinstance(maker, Node) and maker not in seen:
            seen.add(maker)
            if maker.name in ("dot_general", "ragged_dot_general"):
                return True
            if _is_fusible(maker):
                waiting += maker.taken
    return False


def _maker(atom: Atom, makers: Mapping[Value, Any]) -> Any:
    """Returns the item that computes a value; ``None`` if the value is already in memory."""
    maker = makers.get(atom) if isinstance(atom, Value) else None
    while _is_view(maker):
        (atom,) = maker.inputs[:1]
        maker = makers.get(atom) if isinstance(atom, Value) else None
    return maker


def _is_view(item: Any) -> TypeGuard[Node]:
    """Returns true if an item leaves the bytes of an array as they are."""
    if not isinstance(item, Node) or item.name not in jaxprs.VIEWS | jaxprs.VARYING:
        return False
    return item.name != "reshape" or item.params["dimensions"] is None  # else it transposes


def with_views(values: Iterable[Value], items: Iterable[Any]) -> frozenset[Value]:
    """Returns values and their views among the outputs of the items, which are in order."""
    found = set(values)
    for item in items if found else ():
        if _is_view(item) and item.taken and found.issuperset(item.taken):
            found.update(item.outputs)
    return frozenset(found)


def is_plain_product(item: Any) -> bool:
    """Returns true for a product without a batch and without explicit shardings."""
    if not isinstance(item, Node) or item.name != "dot_general" or is_typed(item):
        return False
    _, (batch, _) = item.params["dimension_numbers"]
    return not batch


def users_of(items: Iterable[Any]) -> dict[Value, list[Any]]:
    """Returns, for each value, the items that read it."""
    users: dict[Value, list[Any]] = {}
    for item in items:
        for value in item.taken:
            users.setdefault(value, []).append(item)
    return users
