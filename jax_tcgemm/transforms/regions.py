"""Which equations become the epilogue of which product.

The region of a product is what follows it element by element on values of its shape, and what makes
the operands of those, where that is made element by element of fewer bytes. A region depends on
nothing that depends on it: no value leaves it on the way and comes back. Each region is looked for
in bounded time, so that the time for a program is proportional to its length.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable
from typing import Any

from jax_tcgemm.epilogue.translation import MAX_OPERANDS, MAX_RESULTS
from jax_tcgemm.lowering.compiled_source import MOST_WARP_BYTES, matrix_bytes
from jax_tcgemm.transforms.fused import Fused
from jax_tcgemm.transforms.graph import Atom, Graph, Node, Value
from jax_tcgemm.transforms.matrix_form import MatrixForm, RaggedForm
from jax_tcgemm.transforms.outputs import Flow, written
from jax_tcgemm.transforms.products import (
    DRAWING,
    REDUCTIONS,
    SPREADING,
    compared,
    draws_as_usual,
    form_of,
    is_elementwise,
    is_product,
    is_typed,
    with_factors_exchanged,
)
from jax_tcgemm.transforms.wiring import Position, Wiring

# A value smaller than this part of the product is read for nothing.
_SMALL = 1 / 16

# The most results of two products in one kernel; more are written faster by one kernel that reads
# the other product (docs/experiments/fusion.md).
_MOST_OF_PAIR = 3

# The most operations of a region, and of those that make its operands.
_MOST_NODES = 100
_MOST_PULLED = 50

# The most values that members read, before those that are made of others are left out.
_MOST_READ = 3 * MAX_OPERANDS

# The most items that are moved before a region.
_MOST_MOVED = 1000


def with_regions(graph: Graph) -> Graph:
    """Returns the same graph with products joined with what becomes of them."""
    items = with_factors_exchanged(graph)
    products = [*filter(is_product, items)]
    wiring = Wiring(items, products, graph.returned)
    kept = compared(items)
    for product in products:
        if product in wiring.position:
            region = _Region.of(graph, wiring, kept, (product,))
            if region is not None:
                region.contract()
    joined = dataclasses.replace(graph, items=wiring.items)
    return dataclasses.replace(joined, items=joined.used())


class _Region:
    """A product, or two, and the nodes after it that may become its epilogue.

    Attributes:
        members: nodes that follow the products element by element.
        sums: nodes that add up the rows of members' values.
        pulled: nodes that make operands of those.
        leaves: what all of these read.
        outputs: the values that the kernel writes.
        required: items behind the first product that have to come before the kernel.
    """

    def __init__(
        self,
        graph: Graph,
        wiring: Wiring,
        compared: frozenset[Value],
        products: tuple[Node, ...],
    ):
        self.graph, self.wiring, self.products = graph, wiring, products
        self.compared = compared
        self.returned = graph.returned
        forms = {form_of(product) for product in products}
        self.form = forms.pop() if len(forms) == 1 else None
        self.accumulators = [product.outputs[0] for product in products]
        self.shape = self.accumulators[0].shape
        self.bytes = self.accumulators[0].bytes
        self.start = min(wiring.position[product] for product in products)
        self.members: list[Node] = []
        self.sums: list[Node] = []
        self.within: set[Value] = set()
        self.pulled: set[Node] = set()
        self.too_long: set[Value] = set()  # to be made by the kernel
        self.leaves: dict[Value, None] = {}
        self.outputs: list[Value] = []
        self.required: set[Any] = set()

    @classmethod
    def of(
        cls,
        graph: Graph,
        wiring: Wiring,
        compared: frozenset[Value],
        products: tuple[Node, ...],
    ) -> _Region | None:
        """Returns the region of products, ``None`` where there is nothing to gain.

        Args:
            graph: the program.
            wiring: its items as they are connected now.
            compared: the values that must not be made twice.
            products: one, or two of a gated layer.
        """
        region = cls(graph, wiring, compared, products)
        if region.form is None:
            return None
        is_worthwhile = region.find(_MOST_NODES)
        pair = region.partner() if len(products) == 1 else None
        if pair is not None:
            both = cls.of(graph, wiring, compared, (*products, pair))
            if both is not None and len(both.outputs) <= _MOST_OF_PAIR:
                return both
        while is_worthwhile and region.exceeds_kernels():
            count = len(region.members)
            fewer = max(1, len(region.outputs) - MAX_RESULTS, count // 10)
            region = cls(graph, wiring, compared, products)
            is_worthwhile = region.find(count - fewer)
        return region if is_worthwhile and region.can_move() else None

    def find(self, most: int) -> bool:
        """Finds the nodes and the results of a region of so many members at most.

        Returns:
            Whether the kernel writes a matrix that others cannot make as well.
        """
        self.grow(most)
        self.pull()
        return self.choose_outputs()

    # What there is.

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
            or sum(matrix_bytes(x.aval.dtype.itemsize) for x in matrices) > MOST_WARP_BYTES
        )

    def grow(self, most: int) -> None:
        """Adds what follows the products, up to so many nodes."""
        own = set(self.products)
        self.within.update(self.accumulators)
        waiting: list[tuple[Position, Any]] = []
        seen: set[Any] = set(own)

        def follow(value: Value) -> None:
            for user in self.wiring.users_of(value):
                if user not in seen:
                    seen.add(user)
                    heapq.heappush(waiting, (self.wiring.position[user], user))

        for value in self.accumulators:
            follow(value)
        read: set[Value] = set()
        while waiting:
            _, item = heapq.heappop(waiting)
            others = [x for x in item.taken if x not in self.within]
            if any(self.wiring.depends_on(x, self.products) for x in others):
                continue  # on values of the region that come back by way of others
            is_short = len(self.members) < most and len(read) <= _MOST_READ
            if is_short and self.is_member(item):
                self.members.append(item)
                read.update(others)
                for value in item.outputs:
                    self.within.add(value)
                    follow(value)
            elif self.is_sum(item):
                self.sums.append(item)

    def is_member(self, item: Any) -> bool:
        """Whether an item works element by element on values of the product's shape."""
        return (
            is_elementwise(item)
            and item.outputs[0].shape == self.shape
            and self.is_beside(item)
            and all(map(self.fits, item.inputs))
        )

    def is_beside(self, node: Node) -> bool:
        """Whether a node is to be computed where and as the product is."""
        return node.context == self.products[0].context

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
        shape = atom.shape if isinstance(atom, Value) else atom.aval.shape
        if not shape or shape == self.shape:
            return True
        pairs = zip(shape, self.shape, strict=False)
        return len(shape) == len(self.shape) and all(x in (1, extent) for x, extent in pairs)

    # What it reads.

    def pull(self) -> None:
        """Adds what makes the values that are read, where that takes less to read."""
        known = self.external([*self.members, *self.sums])
        for value in known:
            nodes, leaves = self.cone(value) or (set(), set())
            if not nodes or len(self.pulled | nodes) > _MOST_PULLED:
                continue
            extra = sum(x.bytes for x in leaves if x not in known and self.is_large(x))
            matrices = [x for x in nodes if self.is_large(x.outputs[0])]
            is_ours = all(self.is_ours(x, nodes) for x in matrices)
            # Numbers that others read, too, are drawn once.
            is_free = extra <= value.bytes and not any(x.name in DRAWING for x in nodes)
            if is_free or (is_ours and self.is_large(value)):
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

    def cone(self, value: Value) -> tuple[set[Node], set[Value]] | None:
        """Returns what makes a value element by element, and what that starts from.

        ``None`` where that is more than a kernel may have.
        """
        nodes: set[Node] = set()
        leaves: set[Value] = set()
        waiting = [value]
        while waiting:
            each = waiting.pop()
            maker = self.wiring.makers.get(each)
            if maker in nodes:
                continue
            if maker is not None and self.is_made_in_place(maker, each):
                nodes.add(maker)
                waiting += maker.taken
            else:
                leaves.add(each)
            is_too_long = len(nodes) > _MOST_PULLED or len(leaves) > MAX_OPERANDS
            if is_too_long or each in self.too_long:
                self.too_long.add(value)
                return None
        return nodes, leaves

    def is_made_in_place(self, maker: Any, value: Value) -> bool:
        """Whether the kernel may make a value, instead of reading it."""
        if not isinstance(maker, Node) or maker.has_effects or len(maker.outputs) != 1:
            return False
        if value in self.compared:
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
        return is_cheap and is_elementwise(maker) and all(map(self.fits, maker.inputs))

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

    def choose_outputs(self) -> bool:
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
        # Others are most likely two kernels of XLA's, or one.
        values, flow = self.flow(made, hard, soft, min(len(outside), 2))
        chosen = written(flow)
        self.outputs = [values[i] for i in chosen or ()]
        self.outputs += [x for node in self.sums for x in node.outputs]
        return chosen is not None

    def flow(
        self, made: list[Value], hard: list[Value], soft: list[Value], kernels: int
    ) -> tuple[list[Value], Flow]:
        """Returns the values of the region, and the same by number."""
        pulled = self.ordered(self.pulled)
        makers = {x: node for node in (*self.members, *pulled) for x in node.outputs}
        values = list(dict.fromkeys([*self.accumulators, *makers, *self.leaves]))
        number = {value: i for i, value in enumerate(values)}

        def numbers(some: Iterable[Value]) -> tuple[int, ...]:
            return tuple([number[x] for x in some])

        flow = Flow(
            sizes=tuple([x.bytes if self.is_large(x) else 0 for x in values]),
            made_of=tuple([numbers(makers[x].taken) if x in makers else None for x in values]),
            products=len(self.accumulators),
            choices=numbers(made),
            hard=numbers(hard),
            soft=numbers(soft),
            kernels=kernels,
            reduced=numbers(node.taken[0] for node in self.sums),
        )
        return values, flow

    def is_soft_user(self, item: Any) -> bool:
        """Whether an item works element by element, so that it could as well start before."""
        if isinstance(item, Node) and item.name in REDUCTIONS:
            return True
        return is_elementwise(item) and all(map(self.fits, item.inputs))

    # What becomes of the graph.

    def can_move(self) -> bool:
        """Whether what it needs does not depend on it, nor does anything that has effects."""
        makers = [self.wiring.makers.get(x) for x in self.leaves]
        ahead = {x for x in makers if x is not None and self.wiring.position[x] >= self.start}
        before = self.wiring.before([*ahead, *self.products], self.start, _MOST_MOVED)
        if before is None:
            return False
        self.required = ahead | before
        own = {*self.products, *self.members, *self.sums}
        return self.required.isdisjoint(own) and not any(x.has_effects for x in self.required)

    def contract(self) -> None:
        """Puts the region into the graph as one item."""
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
        # The other nodes stay for those who use them, and start from what is written.
        made = set(self.outputs)
        gone = [node for node in needed if not made.isdisjoint(node.outputs)]
        self.wiring.join([*self.products, *gone], fused, self.required, self.start)

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
