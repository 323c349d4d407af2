"""Finds the region of a product: its epilogue and the nodes that make the epilogue's operands."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable
from typing import Any

from jax_tcgemm.epilogue.translation import MAX_OPERANDS
from jax_tcgemm.transforms.graph import Atom, Node, Value
from jax_tcgemm.transforms.matrix_form import MatrixForm, RaggedForm
from jax_tcgemm.transforms.products import (
    DRAWING,
    REDUCTIONS,
    SPREADING,
    draws_as_usual,
    form_of,
    is_elementwise,
    is_product,
    is_typed,
    reads_parts,
)
from jax_tcgemm.transforms.wiring import Position, Wiring

# Reading a value is free if it is at most this fraction of the product's size.
_SMALL = 1 / 16

# At most this many operations make operands of a region.
_MOST_PULLED = 50


@dataclasses.dataclass(frozen=True)
class Program:
    """A program in which regions are searched.

    Attributes:
        wiring: the current connections of the items.
        arguments: the values that the caller passes.
        returned: the values that the program returns.
        stacked: the returned values that the caller copies into a stacked array.
        compared: the values that must not be computed twice, see ``products.compared``.
        answers: cached facts about nodes, by the shape, size and context of a region.
    """

    wiring: Wiring
    arguments: frozenset[Value]
    returned: frozenset[Value]
    stacked: frozenset[Value]
    compared: frozenset[Value]
    answers: dict[Any, _Answers] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _Answers:
    """Facts about nodes, shared by all regions of one shape, size and context.

    Attributes:
        is_member: whether a node works element by element on values of this shape.
        may_make: whether a kernel may compute the node's output.
        too_long: values whose cone exceeds a kernel's limits, until the next join.
    """

    is_member: dict[Any, bool] = dataclasses.field(default_factory=dict)
    may_make: dict[Any, bool] = dataclasses.field(default_factory=dict)
    too_long: set[Value] = dataclasses.field(default_factory=set)


class Region:
    """One product or two, and the nodes that may become their epilogue.

    Attributes:
        form: how this package's kernels compute the products; ``None`` if they cannot.
        start: the position of the first product.
        members: element-wise nodes that follow the products.
        sums: nodes that add up the rows of members' values.
        pulled: nodes that make operands of the members and sums.
        leaves: the values that all these nodes read.
    """

    def __init__(self, program: Program, products: tuple[Node, ...], most: int):
        """Finds the nodes.

        Args:
            program: the program that contains the products.
            products: one product, or two that share an operand.
            most: the maximum number of members.
        """
        self.program, self.wiring, self.products = program, program.wiring, products
        forms = {form_of(product) for product in products}
        self.form = forms.pop() if len(forms) == 1 else None
        self.accumulators = [product.outputs[0] for product in products]
        self.shape = self.accumulators[0].shape
        self.bytes = self.accumulators[0].bytes
        self.context = products[0].context
        self.start = min(self.wiring.position[product] for product in products)
        self.members: list[Node] = []
        self.sums: list[Node] = []
        self.pulled: set[Node] = set()
        self.leaves: dict[Value, None] = {}
        self._within: set[Value] = set()
        kind = self.shape, self.bytes, self.context
        self._answers = program.answers.setdefault(kind, _Answers())
        if self.form is not None:
            self.grow(most)
        if self.members or self.sums:
            self.pull()

    def is_large(self, atom: Atom) -> bool:
        """Returns true if reading a value takes noticeable time."""
        return isinstance(atom, Value) and atom.bytes > _SMALL * self.bytes

    def grow(self, most: int) -> None:
        """Adds the nodes that follow the products, with up to ``most`` members."""
        own = set(self.products)
        self._within.update(self.accumulators)
        waiting: list[tuple[Position, Any]] = []
        seen: set[Any] = set(own)

        def follow(value: Value) -> None:
            for user in self.wiring.users_of(value):
                if user not in seen:
                    seen.add(user)
                    heapq.heappush(waiting, (self.wiring.position[user], user))

        for value in self.accumulators:
            follow(value)
        read: set[Value] = set()  # from memory
        bits = self.wiring.bits_of(self.products)
        while waiting:
            _, item = heapq.heappop(waiting)
            others = [x for x in item.taken if x not in self._within]
            if any(self.wiring.depends_on(x, bits) for x in others):
                continue  # another input depends on the region by a path outside it
            is_short = len(self.members) < most and len(read) <= MAX_OPERANDS
            if is_short and self.is_member(item):
                self.members.append(item)
                read.update(filter(None, map(self.origin, others)))
                for value in item.outputs:
                    self._within.add(value)
                    follow(value)
            elif self.is_sum(item):
                self.sums.append(item)

    def is_member(self, item: Any) -> bool:
        """Returns true if an item works element by element on values of the product's shape."""
        answers = self._answers.is_member
        known = answers.get(item)
        if known is None:
            known = answers[item] = (
                is_elementwise(item)
                and item.outputs[0].shape == self.shape
                and self.is_beside(item)
                and all(map(self.fits, item.inputs))
            )
        return known

    def is_beside(self, node: Node) -> bool:
        """Returns true if a node has the same context as the product (see ``context_of``)."""
        return node.context == self.context

    def is_sum(self, item: Any) -> bool:
        """Returns true if an item adds up the rows of all matrices, like the gradient of a bias.

        The maximum of a column is not supported: the program compares it with values that other
        kernels compute from a rounded value.
        """
        if not isinstance(item, Node) or item.name != "reduce_sum" or not self.is_beside(item):
            return False
        if isinstance(self.form, RaggedForm):  # kernels over groups cannot reduce
            return False
        (operand,) = item.inputs
        axes = {int(axis) for axis in item.params["axes"]}
        return operand in self._within and axes == set(range(len(self.shape) - 1))

    def fits(self, atom: Atom) -> bool:
        """Returns true if a value has the product's shape or broadcasts to it at equal rank.

        Scalars fit as well.
        """
        shape = atom.shape if isinstance(atom, Value) else atom.aval.shape
        if not shape or shape == self.shape:
            return True
        pairs = zip(shape, self.shape, strict=False)
        return len(shape) == len(self.shape) and all(x in (1, extent) for x, extent in pairs)

    # The nodes that make the region's operands.

    def pull(self) -> None:
        """Adds the nodes that make the operands, if their inputs take fewer bytes to read."""
        known = self.external([*self.members, *self.sums])
        for value in known:
            if not self.is_made_here(value):
                continue
            nodes, leaves = self.cone(value) or (set(), set())
            if not nodes or len(self.pulled | nodes) > _MOST_PULLED:
                continue
            extra = sum(x.bytes for x in leaves if x not in known and self.is_large(x))
            matrices = [x for x in nodes if self.is_large(x.outputs[0])]
            is_ours = all(self.is_ours(x, nodes) for x in matrices)
            # If others also read random numbers, they are drawn once, not again in the kernel.
            is_free = extra <= value.bytes and not any(x.name in DRAWING for x in nodes)
            if is_free or (is_ours and self.is_large(value)):
                self.pulled.update(nodes)
        self.find_leaves()

    def find_leaves(self) -> None:
        """Sets ``leaves``, the values that the nodes read."""
        pulled = self.ordered(self.pulled)
        self.leaves = dict.fromkeys(self.external([*pulled, *self.members, *self.sums]))

    def external(self, nodes: Iterable[Node]) -> list[Value]:
        """Returns the inputs of nodes that neither the nodes nor the products compute."""
        nodes = list(nodes)
        given = {value for node in nodes for value in node.outputs} | set(self.accumulators)
        return list(dict.fromkeys(x for node in nodes for x in node.taken if x not in given))

    def cone(self, value: Value) -> tuple[set[Node], set[Value]] | None:
        """Returns the nodes that make a value element by element, and the values they start from.

        ``None`` if these are more than a kernel may have.
        """
        nodes: set[Node] = set()
        leaves: set[Value] = set()
        waiting = [value]
        while waiting:
            each = waiting.pop()
            maker = self.wiring.makers.get(each)
            if maker in nodes:
                continue
            if maker is not None and self.is_made_here(each):
                nodes.add(maker)
                waiting += maker.taken
            else:
                leaves.add(each)
            is_too_long = len(nodes) > _MOST_PULLED or len(leaves) > MAX_OPERANDS
            if is_too_long or each in self._answers.too_long:
                self._answers.too_long.add(value)
                return None
        return nodes, leaves

    def origin(self, value: Value) -> Value | None:
        """Returns a value that the kernel must read to have this one, ``None`` if there is none."""
        for _ in range(_MOST_PULLED):
            if not self.is_made_here(value):
                break
            taken = self.wiring.makers[value].taken
            if not taken:
                return None
            value = taken[0]
        return value

    def is_made_here(self, value: Value) -> bool:
        """Returns true if the kernel may compute a value instead of reading it."""
        maker = self.wiring.makers.get(value)
        known = self._answers.may_make.get(maker)
        if known is None:
            known = self._answers.may_make[maker] = self._may_make(maker, value)
        return known

    def _may_make(self, maker: Any, value: Value) -> bool:
        if not isinstance(maker, Node) or maker.has_effects or len(maker.outputs) != 1:
            return False
        if value in self.program.compared:
            return False
        if not self.is_beside(maker):
            return False
        if maker.name in DRAWING:
            return value.shape == self.shape and draws_as_usual(maker)
        if not self.fits(value) or not value.shape:
            return False
        if maker.name in SPREADING:
            return not is_typed(maker)
        # The program computes a row or a column once; the kernel would compute it for each element.
        is_cheap = self.is_large(value) or maker.name == "convert_element_type"
        return is_cheap and is_elementwise(maker) and all(map(self.fits, maker.inputs))

    def is_ours(self, node: Node, others: set[Node]) -> bool:
        """Returns true if nothing outside the region uses a node's outputs."""
        own = {*self.members, *self.sums, *others}
        return all(
            x not in self.program.returned and own.issuperset(self.wiring.users_of(x))
            for x in node.outputs
        )

    def partner(self) -> Node | None:
        """Returns the second product of a gated layer, if the region reads one."""
        (product,), form = self.products, self.form
        if not isinstance(form, MatrixForm) or form.transpose_a or len(form.b_shape) != 2:
            return None
        for value in self.leaves:
            other = self.wiring.makers.get(value)
            if (
                isinstance(other, Node)
                and is_product(other)
                and other.name == product.name
                and other.inputs[0] is product.inputs[0]
                and other.inputs[1].shape == product.inputs[1].shape
                and other.params == product.params
                and value.aval == self.accumulators[0].aval
            ):
                return other
        return None

    def is_soft_user(self, item: Any, value: Value) -> bool:
        """Checks if an item could itself compute a value that it reads, from an earlier one."""
        if reads_parts(item, value) or (isinstance(item, Node) and item.name in REDUCTIONS):
            return True
        return is_elementwise(item) and all(map(self.fits, item.inputs))

    def ordered(self, nodes: Iterable[Node]) -> list[Node]:
        """Returns nodes in the order of the program."""
        return sorted(nodes, key=self.wiring.position.__getitem__)
