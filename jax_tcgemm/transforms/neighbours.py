"""The operations around a product: transposes that it absorbs, operations that XLA would fuse."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from jax_tcgemm import _compat
from jax_tcgemm.transforms.graph import Atom, Graph, Node, Value
from jax_tcgemm.transforms.matrix_form import matrix_form
from jax_tcgemm.transforms.products import SPREADING, is_elementwise, is_typed

_Dims = tuple[int, ...]

# A product of at most this many rows or columns takes about as long as reading the other operand.
_FEW = 64
# A product of few rows with fewer bytes takes about as long as a launch. XLA's own kernel is not
# slower. XLA may also add up its partial sums in the next kernel, and updates it sooner in a
# command buffer.
_SMALL_BYTES = 4 * 2**20
# XLA merges products that share an operand if one of the products is no larger than this.
_JOINED_BYTES = 32 * 2**20
# The search for a product before an operand visits at most this many operations.
_MOST_LOOKED_AT = 50
# Operations that leave the bytes of an array in its declared layout unchanged.
VIEWS = frozenset({"reshape", "squeeze", "expand_dims"})
# Operations that XLA fuses into its own product, in addition to element-wise ones.
_FUSIBLE = SPREADING | {"transpose", "slice", "dynamic_slice", "rev", "pad", "concatenate"}


def absorb_transposes(graph: Graph) -> list[Any]:
    """Returns the items with transposes absorbed into the products next to them.

    A kernel reads a transposed matrix as fast as any other. XLA does not know that: it would
    transpose the kernel's operands and results in memory.
    """
    items = _with_factors_exchanged(graph.used(), graph.returned)
    return _OperandTransposes(items, graph.returned).absorbed()


def note_fallbacks(items: Iterable[Any]) -> None:
    """Sets ``fallback_reason`` of each product that XLA computes."""
    items = list(items)
    makers = {value: item for item in items for value in item.outputs}
    users = users_of(items)
    for item in items:
        item.fallback_reason = _fallback_reason(item, makers, users)


def _fallback_reason(
    product: Node, makers: Mapping[Value, Any], users: Mapping[Value, Sequence[Any]]
) -> str | None:
    """Returns why XLA should compute a product with its neighbours; ``None`` if it should not.

    Args:
        product: any node of a graph.
        makers: the item that computes each value; arguments and constants have none.
        users: the items that read each value.
    """
    if product.name != "dot_general" or product.weight is not None:
        return None
    (contracted, _), (batch, _) = product.params["dimension_numbers"]
    if batch:
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
        if _is_fusible(maker) and not _follows_product(larger, makers):
            return f"few rows, and XLA fuses {maker.name}, which makes the other operand"
        if 0 < _size(product) < _SMALL_BYTES:
            return "few rows by a small matrix: a launch takes as long"
        if min(m, n) > 1 and _has_sibling(product, users):
            return "few rows, and XLA joins it with another product of the same operand"
    return None


def _has_sibling(product: Node, users: Mapping[Value, Sequence[Any]]) -> bool:
    """Returns true if another product also reads the smaller operand, like q, k and v of a layer.

    Callers skip this check for one row: two kernels of this package are faster than XLA's kernel.
    """
    if not all(isinstance(x, Value) for x in product.inputs):
        return False
    side = int(product.inputs[1].bytes < product.inputs[0].bytes)
    shared = product.inputs[side]
    return any(
        user is not product
        and _is_plain_product(user)
        and user.inputs[side] is shared
        and user.context == product.context
        and user.params["dimension_numbers"] == product.params["dimension_numbers"]
        and min(_size(product), _size(user)) <= _JOINED_BYTES
        for user in users.get(shared, ())
    )


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
    while isinstance(maker, Node) and maker.name in VIEWS:
        (atom,) = maker.inputs[:1]
        maker = makers.get(atom) if isinstance(atom, Value) else None
    return maker


# --- Results ---------------------------------------------------------------------------------


def _with_factors_exchanged(items: list[Any], returned: frozenset[Value]) -> list[Any]:
    """Returns the items; a product followed by a transpose has its operands exchanged instead.

    The gradient of a weight is ``dot_general`` and then ``transpose``. If the weight is stored
    transposed and in float32, the gradient is also converted and transposed a second time.
    """
    users = users_of(items)
    replaced: dict[Any, Node] = {}
    removed: set[Any] = set()
    for item in items:
        if item.name != "dot_general" or is_typed(item):
            continue
        product, conversion, (result,) = item, None, item.outputs
        while True:
            user = _only_user(result, users, returned)
            if user is not None and conversion is None and _is_conversion(user, item):
                behind = _only_user(user.outputs[0], users, returned)
                if _is_exchange(behind, product):
                    conversion, user = user, behind
            if user is None or not _is_exchange(user, product):
                break
            removed.add(user)
            product, result = _exchanged(product), user.outputs[0]
        if product is item:
            continue
        if conversion is None:
            replaced[item] = _with(product, outputs=(result,))
        else:
            (own,) = item.outputs
            aval = result.aval.update(dtype=own.dtype, weak_type=own.aval.weak_type)
            between = Value(aval)
            replaced[item] = _with(product, outputs=(between,))
            replaced[conversion] = Node(conversion.eqn, (between,), (result,), conversion.scope)
    return [replaced.get(item, item) for item in items if item not in removed]


def _only_user(
    value: Value, users: Mapping[Value, Sequence[Any]], returned: frozenset[Value]
) -> Node | None:
    """Returns the item that reads a value if exactly one item reads it, else ``None``."""
    found = users.get(value, [])
    return found[0] if len(found) == 1 and value not in returned else None


def _is_conversion(node: Any, product: Node) -> TypeGuard[Node]:
    """Returns true if a node is a type conversion in the same context as a product."""
    return (
        isinstance(node, Node)
        and node.name == "convert_element_type"
        and node.context == product.context
        and not is_typed(node)
    )


def _is_exchange(node: Any, product: Node) -> bool:
    """Returns true if a transpose gives the result of the product with exchanged operands."""
    if not isinstance(node, Node) or node.name != "transpose" or node.context != product.context:
        return False
    (contracted, _), (batch, _) = product.params["dimension_numbers"]
    lead, rank = len(batch), len(node.params["permutation"])
    rows = len(product.inputs[0].aval.shape) - lead - len(contracted)
    permutation = (*range(lead), *range(lead + rows, rank), *range(lead, lead + rows))
    return tuple(node.params["permutation"]) == permutation


def _exchanged(product: Node) -> Node:
    params = dict(product.params)
    params["dimension_numbers"] = tuple(pair[::-1] for pair in params["dimension_numbers"])
    params["precision"] = _compat.exchanged_precision(params["precision"])
    return _with(product, eqn=product.eqn.replace(params=params), inputs=product.inputs[::-1])


def _with(product: Node, **changes: Any) -> Node:
    same = {"eqn": product.eqn, "inputs": product.inputs, "outputs": product.outputs}
    return Node(**{**same, **changes}, scope=product.scope)


# --- Operands --------------------------------------------------------------------------------


class _OperandTransposes:
    """Makes products read the untransposed matrix instead of its transpose.

    A matrix may be converted after the transpose, like parameters that are stored in float32. This
    class then moves the conversion before the transpose, unless anything else reads the result.
    """

    def __init__(self, items: Sequence[Any], returned: frozenset[Value]):
        self._items = items
        self._returned = returned
        self._makers = {value: item for item in items for value in item.outputs}
        self._users = users_of(items)
        self._converted: dict[Value, Node] = {}  # untransposed, by the transposed value
        self._is_convertible: dict[Value, bool] = {}

    def absorbed(self) -> list[Any]:
        """Returns the items, with each new conversion before the first product that reads it."""
        result: list[Any] = []
        for item in self._items:
            if _is_plain_product(item):
                for side in range(2):
                    item, conversion = self._with_operand(item, side)
                    if conversion is not None:
                        result.append(conversion)
            result.append(item)
        return result

    def _with_operand(self, product: Node, side: int) -> tuple[Node, Node | None]:
        """Returns the product with one operand untransposed, and the conversion if it is new."""
        value = product.inputs[side]
        transpose, conversion = self._origin(value, product)
        if transpose is None:
            return product, None
        if conversion is not None and not self._may_convert(value, transpose):
            return product, None
        changed = _untransposed(product, side, transpose)
        if changed is None or conversion is None:
            return changed or product, None
        if value in self._converted:
            return _with_input(changed, side, self._converted[value].outputs[0]), None
        source = transpose.inputs[0]
        (old,) = conversion.outputs
        aval = source.aval.update(dtype=old.dtype, weak_type=old.aval.weak_type)
        new = Node(conversion.eqn, (source,), (Value(aval),), conversion.scope)
        self._converted[value] = new
        return _with_input(changed, side, new.outputs[0]), new

    def _origin(self, value: Atom, product: Node) -> tuple[Node | None, Node | None]:
        """Returns the transpose that makes an operand, and the conversion after it, if any."""
        if not isinstance(value, Value):
            return None, None
        maker, conversion = self._makers.get(value), None
        if _is_conversion(maker, product) and isinstance(maker.inputs[0], Value):
            maker, conversion = self._makers.get(maker.inputs[0]), maker
        is_known = (
            isinstance(maker, Node)
            and maker.name == "transpose"
            and maker.context == product.context
            and not is_typed(maker)
            and isinstance(maker.inputs[0], Value)
        )
        return (maker, conversion) if is_known else (None, None)

    def _may_convert(self, value: Value, transpose: Node) -> bool:
        """Returns true if only products that can absorb the transpose read a converted value."""
        if value not in self._is_convertible:
            users = self._users[value]
            self._is_convertible[value] = (
                value not in self._returned
                and all(map(_is_plain_product, users))
                and all(
                    _untransposed(user, side, transpose) is not None
                    for user in users
                    for side in range(2)
                    if user.inputs[side] is value
                )
            )
        return self._is_convertible[value]


def _is_plain_product(item: Any) -> bool:
    """Returns true for a product without a batch and without explicit shardings."""
    if not isinstance(item, Node) or item.name != "dot_general" or is_typed(item):
        return False
    _, (batch, _) = item.params["dimension_numbers"]
    return not batch


def _untransposed(product: Node, side: int, transpose: Node) -> Node | None:
    """Returns the product on the untransposed matrix; ``None`` if no kernel can read it in place.

    Args:
        product: a product without a batch.
        side: the number of the operand.
        transpose: the node that makes the operand, or that a conversion to the operand reads.
    """
    permutation = transpose.params["permutation"]
    contracted = list(product.params["dimension_numbers"][0])
    rank = len(permutation)
    free = [permutation[i] for i in range(rank) if i not in contracted[side]]
    if free != sorted(free):
        return None
    contracted[side] = tuple(permutation[i] for i in contracted[side])
    dims = (tuple(contracted), ((), ()))
    shapes = [x.aval.shape for x in product.inputs]
    shapes[side] = transpose.inputs[0].aval.shape
    if matrix_form(shapes[0], shapes[1], dims) is None:
        return None
    eqn = product.eqn.replace(params={**product.params, "dimension_numbers": dims})
    return _with_input(_with(product, eqn=eqn), side, transpose.inputs[0])


def _with_input(product: Node, side: int, atom: Atom) -> Node:
    inputs = list(product.inputs)
    inputs[side] = atom
    return _with(product, inputs=tuple(inputs))


def users_of(items: Iterable[Any]) -> dict[Value, list[Any]]:
    """Returns, for each value, the items that read it."""
    users: dict[Value, list[Any]] = {}
    for item in items:
        for value in item.taken:
            users.setdefault(value, []).append(item)
    return users
