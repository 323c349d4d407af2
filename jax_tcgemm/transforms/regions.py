"""Which equations become the epilogue of which product.

From a product on, whatever works element by element on values of its shape is its region, and so
is what those read, where it is made element by element of less than it takes to read it. A region
depends on nothing that depends on it: no value leaves it on the way and comes back.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable
from typing import Any

from jax_tcgemm._compat import jaxprs
from jax_tcgemm.epilogue.translation import MAX_OPERANDS, MAX_RESULTS
from jax_tcgemm.lowering.compiled_source import MOST_WARP_BYTES, matrix_bytes
from jax_tcgemm.transforms.fused import Fused
from jax_tcgemm.transforms.graph import Atom, Graph, Node, Value
from jax_tcgemm.transforms.matrix_form import MatrixForm, RaggedForm
from jax_tcgemm.transforms.outputs import Flow
from jax_tcgemm.transforms.products import (
    DRAWING,
    REDUCTIONS,
    SPREADING,
    draws_as_usual,
    form_of,
    is_elementwise,
    is_product,
    is_typed,
    with_factors_exchanged,
)
from jax_tcgemm.transforms.wiring import Wiring

# A value that takes less than so many times the product's bytes is read for nothing.
_SMALL = 1 / 16

# Of two products in one kernel; more are written in less time by one that reads the other product
# (docs/experiments/fusion.md).
_MOST_OF_PAIR = 3

# What has more operations is left to XLA from there on; and of those that make operands.
_MOST_NODES = 100
_MOST_PULLED = 50


def with_regions(graph: Graph) -> Graph:
    """Returns the same with products joined with what becomes of them."""
    wiring = Wiring(with_factors_exchanged(graph))
    for product in [item for item in wiring.items if is_product(item)]:
        if product in wiring.position:
            region = _Region.of(graph, wiring, (product,))
            if region is not None:
                region.contract()
    joined = dataclasses.replace(graph, items=wiring.items)
    return dataclasses.replace(joined, items=joined.used())


class _Region:
    """A product, or two, and the nodes after it that may become its epilogue."""

    def __init__(self, graph: Graph, wiring: Wiring, products: tuple[Node, ...]):
        self.graph, self.wiring, self.products = graph, wiring, products
        self.returned = graph.returned
        forms = {form_of(product) for product in products}
        self.form = forms.pop() if len(forms) == 1 else None
        self.accumulators = [product.outputs[0] for product in products]
        self.start = min(wiring.position[product] for product in products)
        self.members: list[Node] = []
        self.sums: list[Node] = []
        self.within: set[Value] = set()
        self.depends: dict[Value, bool] = {}  # on the products
        self.pulled: set[Node] = set()
        self.leaves: dict[Value, None] = {}
        self.outputs: list[Value] = []
        self.is_worthwhile = False  # whether a matrix is written that others don't make as well

    @classmethod
    def of(cls, graph: Graph, wiring: Wiring, products: tuple[Node, ...]) -> _Region | None:
        """Returns the region of products, ``None`` where there is nothing to gain."""
        region = cls(graph, wiring, products)
        if region.form is None:
            return None
        region.grow(_MOST_NODES)
        region.pull()
        pair = region.partner() if len(products) == 1 else None
        if pair is not None:
            both = cls.of(graph, wiring, (*products, pair))
            if both is not None and len(both.outputs) <= _MOST_OF_PAIR:
                return both
        region.choose_outputs()
        while region.is_worthwhile and region.exceeds_kernels():
            most = len(region.members) - max(1, len(region.outputs) - MAX_RESULTS)
            region = cls(graph, wiring, products)
            region.grow(most)
            region.pull()
            region.choose_outputs()
        return region if region.is_worthwhile and region.can_move() else None

    # What there is.

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the product."""
        return self.accumulators[0].shape

    @property
    def bytes(self) -> int:
        """What the product takes in memory."""
        return self.accumulators[0].bytes

    def is_large(self, atom: Atom) -> bool:
        """Whether it takes time to read a value."""
        return isinstance(atom, Value) and atom.bytes > _SMALL * self.bytes

    def exceeds_kernels(self) -> bool:
        """Whether a kernel reads or writes fewer matrices."""
        leaves = self.external(self.needed())
        matrices = [x for x in (*leaves, *self.outputs) if self.is_large(x)]
        return (
            len(leaves) > MAX_OPERANDS
            or len(self.outputs) > MAX_RESULTS
            or sum(matrix_bytes(x.dtype.itemsize) for x in matrices) > MOST_WARP_BYTES
        )

    def grow(self, most: int) -> None:
        """Adds what follows the products, up to so many nodes."""
        own = set(self.products)
        self.within.update(self.accumulators)
        waiting: list[tuple[int, Any]] = []
        seen: set[Any] = set(own)

        def follow(value: Value) -> None:
            for user in self.wiring.users_of(value):
                if user not in seen:
                    seen.add(user)
                    heapq.heappush(waiting, (self.wiring.position[user], user))

        for value in self.accumulators:
            follow(value)
        while waiting:
            _, item = heapq.heappop(waiting)
            if any(x not in self.within and self.comes_back(x) for x in item.taken):
                continue
            if len(self.members) < most and self.is_member(item):
                self.members.append(item)
                for value in item.outputs:
                    self.within.add(value)
                    follow(value)
            elif self.is_sum(item):
                self.sums.append(item)

    def comes_back(self, value: Value) -> bool:
        """Whether a value depends on the products, by what is not of the region."""
        waiting = [value]
        while waiting:
            value = waiting[-1]
            if value in self.depends:
                waiting.pop()
                continue
            maker = self.wiring.makers.get(value)
            if maker is None or self.wiring.position[maker] < self.start:
                self.depends[value] = False
            elif value in self.accumulators:
                self.depends[value] = True
            else:
                unknown = [x for x in maker.taken if x not in self.depends]
                if unknown:
                    waiting += unknown
                    continue
                self.depends[value] = any(self.depends[x] for x in maker.taken)
            waiting.pop()
        return self.depends[value]

    def is_member(self, item: Any) -> bool:
        """Whether an item works element by element on values of the product's shape."""
        return (
            is_elementwise(item)
            and self.is_beside(item)
            and all(x.shape == self.shape for x in item.outputs)
            and all(self.fits(x) for x in item.inputs)
        )

    def is_beside(self, node: Node) -> bool:
        """Whether a node is to be computed where and as the product is."""
        return jaxprs.context_of(node.eqn) == jaxprs.context_of(self.products[0].eqn)

    def is_sum(self, item: Any) -> bool:
        """Whether an item adds up the rows of all matrices, as the gradient of a bias does.

        Not so the largest of a column: it is compared with what others make of a rounded value.
        """
        if not isinstance(item, Node) or item.name != "reduce_sum" or not self.is_beside(item):
            return False
        if isinstance(self.form, RaggedForm):  # of which kernels reduce nothing
            return False
        (operand,) = item.inputs
        axes = {int(axis) for axis in item.params["axes"]}
        return operand in self.within and axes == set(range(len(self.shape) - 1))

    def fits(self, atom: Atom) -> bool:
        """Whether a value is of the product's shape, or goes on along some of its dimensions."""
        shape = atom.aval.shape
        pairs = zip(shape, self.shape, strict=False)
        return not shape or (
            len(shape) == len(self.shape) and all(x in (1, extent) for x, extent in pairs)
        )

    # What it reads.

    def pull(self) -> None:
        """Adds what makes the values that are read, where that takes less to read."""
        known = self.external([*self.members, *self.sums])
        for value in known:
            nodes, leaves = self.cone(value)
            if len(self.pulled | nodes) > _MOST_PULLED:
                continue
            extra = sum(x.bytes for x in leaves if x not in known and self.is_large(x))
            matrices = [x for x in nodes if self.is_large(x.outputs[0])]
            is_ours = all(self.is_ours(x, nodes) for x in matrices)
            # Numbers that others read, too, are drawn once.
            is_free = extra <= value.bytes and not any(x.name in DRAWING for x in nodes)
            if nodes and (is_free or (is_ours and self.is_large(value))):
                self.pulled.update(nodes)
        self.find_leaves()

    def find_leaves(self) -> None:
        """Notes what the nodes read."""
        pulled = self.ordered(self.pulled)
        self.leaves = dict.fromkeys(self.external([*pulled, *self.members, *self.sums]))

    def external(self, nodes: Iterable[Node]) -> list[Value]:
        """Returns what nodes take that none of them, and no product, gives."""
        nodes = list(nodes)
        given = {value for node in nodes for value in node.outputs} | set(self.accumulators)
        return list(dict.fromkeys(x for node in nodes for x in node.taken if x not in given))

    def cone(self, value: Value) -> tuple[set[Node], set[Value]]:
        """Returns what makes a value element by element, and what that starts from."""
        nodes: set[Node] = set()
        leaves: set[Value] = set()
        waiting = [value]
        while waiting:
            value = waiting.pop()
            maker = self.wiring.makers.get(value)
            if maker in nodes:
                continue
            if maker is not None and self.is_made_in_place(maker, value):
                nodes.add(maker)
                waiting += maker.taken
            else:
                leaves.add(value)
        return nodes, leaves

    def is_made_in_place(self, maker: Any, value: Value) -> bool:
        """Whether the kernel may make a value, instead of reading it."""
        if not isinstance(maker, Node) or maker.has_effects or len(maker.outputs) != 1:
            return False
        if not self.is_beside(maker):
            return False
        if maker.name in DRAWING:
            return value.shape == self.shape and draws_as_usual(maker)
        if not self.fits(value) or not value.shape:
            return False
        if maker.name in SPREADING:
            return not is_typed(maker)
        # What is made of a row or a column is made once, not for each element.
        is_cheap = self.is_large(value) or maker.name == "convert_element_type"
        return is_cheap and is_elementwise(maker) and all(self.fits(x) for x in maker.inputs)

    def is_ours(self, node: Node, others: set[Node]) -> bool:
        """Whether nothing else uses what a node gives."""
        own = {*self.members, *self.sums, *others}
        return all(
            x not in self.returned and own.issuperset(self.wiring.users_of(x)) for x in node.outputs
        )

    def partner(self) -> Node | None:
        """Returns another product of the same operand that is read here, of a gated layer."""
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

    # What it gives.

    def choose_outputs(self) -> None:
        """Decides which values are written, and whether the region is worth it."""
        own = {*self.members, *self.sums}
        made = [x for node in self.members for x in node.outputs]
        hard: list[Value] = []
        soft: list[Value] = []
        outside: set[Any] = set()
        for value in [*self.accumulators, *made]:
            users = [item for item in self.wiring.users_of(value) if item not in own]
            stays = value in self.returned and value not in self.graph.stacked
            if stays or not all(map(self.is_soft_user, users)):
                hard.append(value)
            elif users or value in self.returned:
                soft.append(value)
                outside.update(users or [value])
        makers = {x: node for node in (*self.members, *self.pulled) for x in node.outputs}
        reduced = [node.taken[0] for node in self.sums]
        small = _SMALL * self.bytes
        # Most likely others are two kernels, or one.
        kernels = min(len(outside), 2)
        written = Flow(self.accumulators, makers, hard, soft, kernels, reduced, small).written()
        self.is_worthwhile = written is not None
        self.outputs = [*(written or ()), *(x for node in self.sums for x in node.outputs)]

    def is_soft_user(self, item: Any) -> bool:
        """Whether an item works element by element, so that it could as well start before."""
        if isinstance(item, Node) and item.name in REDUCTIONS:
            return True
        return is_elementwise(item) and all(self.fits(x) for x in item.inputs)

    # What becomes of the list.

    def required(self) -> set[Any]:
        """Returns the items from the first product on that have to come before."""
        makers = [self.wiring.makers.get(x) for x in self.leaves]
        ahead = [x for x in makers if x is not None and self.wiring.position[x] >= self.start]
        return {*ahead, *self.wiring.before([*ahead, *self.products], self.start)}

    def can_move(self) -> bool:
        """Whether what it needs does not depend on it, nor does anything that has effects."""
        required = self.required()
        own = {*self.products, *self.members, *self.sums}
        return required.isdisjoint(own) and not any(item.has_effects for item in required)

    def contract(self) -> None:
        """Puts the region into the list as one item."""
        needed = self.needed()
        taken = self.external(needed)
        first, *others = self.products
        factors = [*first.inputs, *(other.inputs[1] for other in others)]
        assert self.form is not None
        fused = Fused(
            self.products,
            self.form,
            len(factors),
            tuple(self.accumulators),
            tuple(needed),
            (*factors, *taken),
            tuple(self.outputs),
        )
        gone: set[Any] = set(self.products)
        made = set(self.outputs)
        # Of the others some are still used elsewhere, and made there of what is written.
        gone.update(node for node in needed if not made.isdisjoint(node.outputs))
        required, items = self.required(), self.wiring.items
        before, after = items[: self.start], items[self.start :]
        moved = [
            *before,
            *(item for item in after if item in required),
            fused,
            *(item for item in after if item not in required and item not in gone),
        ]
        self.wiring.join(gone, fused, moved, self.returned)

    def needed(self) -> list[Node]:
        """Returns the nodes that the outputs need, in order."""
        wanted = set(self.outputs)
        own = {*self.members, *self.sums, *self.pulled}
        kept: list[Node] = []
        for node in self.ordered(own)[::-1]:
            if not wanted.isdisjoint(node.outputs):
                wanted.update(node.taken)
                kept.append(node)
        return kept[::-1]

    def ordered(self, nodes: Iterable[Node]) -> list[Node]:
        """Returns nodes in their order."""
        return sorted(nodes, key=self.wiring.position.__getitem__)
