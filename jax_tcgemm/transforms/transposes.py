"""Removes transposes around products, whose kernels read and write a transposed matrix in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from jax_tcgemm import _compat
from jax_tcgemm.transforms.graph import Atom, Graph, Node, Value
from jax_tcgemm.transforms.matrix_form import matrix_form
from jax_tcgemm.transforms.neighbours import is_plain_product, users_of
from jax_tcgemm.transforms.products import is_typed


def absorb_transposes(graph: Graph) -> list[Any]:
    """Returns the items with transposes absorbed into the products next to them.

    A kernel reads a transposed matrix as fast as any other. XLA does not know that: it would
    transpose the kernel's operands and results in memory.
    """
    items = _with_factors_exchanged(graph.used(), graph.returned)
    return _OperandTransposes(items, graph.returned).absorbed()


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
            if is_plain_product(item):
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
                and all(map(is_plain_product, users))
                and all(
                    _untransposed(user, side, transpose) is not None
                    for user in users
                    for side in range(2)
                    if user.inputs[side] is value
                )
            )
        return self._is_convertible[value]


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
