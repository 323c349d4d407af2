"""What stands before and behind a product: transposes that it takes in, and what XLA would fuse."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax_tcgemm import _compat
from jax_tcgemm.transforms.graph import Atom, Graph, Node, Value
from jax_tcgemm.transforms.matrix_form import matrix_form
from jax_tcgemm.transforms.products import SPREADING, is_elementwise, is_typed

_Dims = tuple[int, ...]

# A product of so few rows, or columns, takes about the time of reading the other operand.
_FEW = 64
# Operations before an operand, at most, among which a product is looked for.
_MOST_LOOKED_AT = 50
# What changes no byte of an array that lies as it is declared.
_VIEWS = frozenset({"reshape", "squeeze", "expand_dims"})
# What XLA computes on the way into its own product, beside what works element by element.
_FUSIBLE = SPREADING | {"transpose", "slice", "dynamic_slice", "rev", "pad", "concatenate"}


def laid_out(graph: Graph) -> list[Any]:
    """Returns the items, where products take and give matrices as they lie in memory.

    A kernel reads a transposed matrix as fast as another. XLA transposes in memory what a kernel of
    this package is given, or gives, since it knows nothing of what the kernel could do.
    """
    items = _with_factors_exchanged(graph.used(), graph.returned)
    return _Untransposing(items, graph.returned).items()


def why_left(product: Node, makers: Mapping[Value, Any]) -> str | None:
    """Says why XLA is to compute a product in a program, if it is.

    Args:
        product: any node of a graph.
        makers: the item that makes a value; arguments and constants have none.
    """
    if product.name != "dot_general":
        return None
    (contracted, _), (batch, _) = product.params["dimension_numbers"]
    if batch:
        return "a batch of products, whose operands XLA lays out as it likes"
    lhs, rhs = (x.aval.shape for x in product.inputs)
    if not all(isinstance(extent, int) for extent in (*lhs, *rhs)):
        return None
    k = math.prod(lhs[i] for i in contracted)
    m, n = (math.prod(shape) // max(k, 1) for shape in (lhs, rhs))
    if k <= 1 or m == n == 1:
        return "no more than an element-wise product, or a sum"
    if min(m, n) <= _FEW:
        larger = max(product.inputs, key=lambda x: math.prod(x.aval.shape))
        maker = _maker(larger, makers)
        if _is_fusible(maker) and not _follows_product(larger, makers):
            return f"few rows, and XLA makes the other operand ({maker.name}) where it reads it"
    return None


def _is_fusible(maker: Any) -> bool:
    return isinstance(maker, Node) and (maker.name in _FUSIBLE or is_elementwise(maker))


def _follows_product(atom: Atom, makers: Mapping[Value, Any]) -> bool:
    """Whether a value is made of a product's result, whose kernel may make it as well."""
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
    """Returns the item that computes what is read; ``None`` for what is in memory already."""
    maker = makers.get(atom) if isinstance(atom, Value) else None
    while isinstance(maker, Node) and maker.name in _VIEWS:
        (atom,) = maker.inputs[:1]
        maker = makers.get(atom) if isinstance(atom, Value) else None
    return maker


# --- Results ---------------------------------------------------------------------------------


def _with_factors_exchanged(items: list[Any], returned: frozenset[Value]) -> list[Any]:
    """Returns the items, where the other product of two operands is what is asked for.

    The gradient of a weight is ``dot_general`` and then ``transpose``: the product of the same
    operands in the other order. The gradient of one that is kept transposed, and in float32, is
    converted and transposed once more.
    """
    found = True
    while found:
        found = False
        users = _users(items)
        anew: dict[Any, Node] = {}
        gone: set[Any] = set()
        for item in items:
            if item.name != "dot_general" or is_typed(item):
                continue
            conversion, user = None, _only_user(item, users, returned)
            if user is not None and user.name == "convert_element_type":
                conversion, user = user, _only_user(user, users, returned)
            if user is None or user.name != "transpose":
                continue
            if tuple(user.params["permutation"]) != _exchange(item):
                continue
            found = True
            gone.add(user)
            if conversion is None:
                anew[item] = _exchanged(item, user.outputs)
            else:
                (old,), (last,) = item.outputs, user.outputs
                aval = last.aval.update(dtype=old.dtype, weak_type=old.aval.weak_type)
                between = Value(aval)
                anew[item] = _exchanged(item, (between,))
                anew[conversion] = Node(conversion.eqn, (between,), user.outputs, conversion.scope)
        items = [anew.get(item, item) for item in items if item not in gone]
    return items


def _only_user(
    node: Node, users: Mapping[Value, Sequence[Any]], returned: frozenset[Value]
) -> Node | None:
    """Returns the item that reads a node's result, if there is one and no other."""
    (result,) = node.outputs
    found = users.get(result, [])
    return found[0] if len(found) == 1 and result not in returned else None


def _exchange(product: Node) -> _Dims:
    """Returns the permutation that puts what ``rhs`` has before what ``lhs`` has."""
    (contracted, _), (batch, _) = product.params["dimension_numbers"]
    lead, rank = len(batch), len(product.outputs[0].shape)
    rows = len(product.inputs[0].aval.shape) - lead - len(contracted)
    return (*range(lead), *range(lead + rows, rank), *range(lead, lead + rows))


def _exchanged(product: Node, outputs: tuple[Value, ...]) -> Node:
    params = dict(product.params)
    params["dimension_numbers"] = tuple(pair[::-1] for pair in params["dimension_numbers"])
    params["precision"] = _compat.exchanged_precision(params["precision"])
    eqn = product.eqn.replace(params=params)
    return Node(eqn, product.inputs[::-1], outputs, product.scope)


# --- Operands --------------------------------------------------------------------------------


class _Untransposing:
    """Lets products read what their operands are transposes of.

    A matrix may be converted after it is transposed, as parameters are that are kept in float32.
    It is then converted as it lies, if products alone read it.
    """

    def __init__(self, items: Sequence[Any], returned: frozenset[Value]):
        self._items = items
        self._returned = returned
        self._makers = {value: item for item in items for value in item.outputs}
        self._users = _users(items)
        self._converted: dict[Value, Node] = {}  # as it lies, by what is converted in ``items``

    def items(self) -> list[Any]:
        """Returns the items, conversions that are new before the first product that needs them."""
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
        """Returns the product without a transpose before one operand, and a conversion if new."""
        value = product.inputs[side]
        transpose, conversion = self._origin(value)
        if transpose is None:
            return product, None
        anew = _untransposed(product, side, transpose)
        if anew is None:
            return product, None
        if conversion is None:
            return anew, None
        if value in self._converted:
            return _with_input(anew, side, self._converted[value].outputs[0]), None
        if not self._all_untransposed(value, transpose):
            return product, None
        source = transpose.inputs[0]
        (old,) = conversion.outputs
        aval = source.aval.update(dtype=old.dtype, weak_type=old.aval.weak_type)
        new = Node(conversion.eqn, (source,), (Value(aval),), conversion.scope)
        self._converted[value] = new
        return _with_input(anew, side, new.outputs[0]), new

    def _origin(self, value: Atom) -> tuple[Node | None, Node | None]:
        """Returns the transpose that an operand is, and the conversion behind it, if any."""
        maker, conversion = self._makers.get(value), None
        if isinstance(maker, Node) and maker.name == "convert_element_type":
            maker, conversion = self._makers.get(maker.inputs[0]), maker
        if not isinstance(maker, Node) or maker.name != "transpose" or is_typed(maker):
            return None, None
        return (maker, conversion) if isinstance(maker.inputs[0], Value) else (None, None)

    def _all_untransposed(self, value: Value, transpose: Node) -> bool:
        return value not in self._returned and all(
            _is_plain_product(user)
            and all(
                _untransposed(user, side, transpose) is not None
                for side in range(2)
                if user.inputs[side] is value
            )
            for user in self._users[value]
        )


def _is_plain_product(item: Any) -> bool:
    """Whether an item is a product without a batch, whose type says nothing of shardings."""
    if not isinstance(item, Node) or item.name != "dot_general" or is_typed(item):
        return False
    _, (batch, _) = item.params["dimension_numbers"]
    return not batch


def _untransposed(product: Node, side: int, transpose: Node) -> Node | None:
    """Returns the product of what was transposed; ``None`` where no kernel reads that as it lies.

    Args:
        product: without a batch.
        side: the number of the operand.
        transpose: what makes it, or what it is a conversion of.
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
    return _with_input(
        Node(eqn, product.inputs, product.outputs, product.scope), side, transpose.inputs[0]
    )


def _with_input(product: Node, side: int, atom: Atom) -> Node:
    inputs = list(product.inputs)
    inputs[side] = atom
    return Node(product.eqn, tuple(inputs), product.outputs, product.scope)


def _users(items: Iterable[Any]) -> dict[Value, list[Any]]:
    users: dict[Value, list[Any]] = {}
    for item in items:
        for value in item.taken:
            users.setdefault(value, []).append(item)
    return users
