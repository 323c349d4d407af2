"""Decides which equations become the epilogue of each product.

The region of a product contains:

- the element-wise operations after the product, on values of its shape
- the element-wise operations that make their other operands, if those start from fewer bytes

A region never depends on an item that depends on the region: no value leaves it and comes back.
The search for each region takes bounded time, so the total time is proportional to the program's
length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from jax_tcgemm.epilogue.translation import MAX_OPERANDS, MAX_RESULTS
from jax_tcgemm.lowering.jit_source import MOST_WARP_BYTES, matrix_bytes
from jax_tcgemm.transforms.caches import with_caches
from jax_tcgemm.transforms.dequantized import with_stored_weights
from jax_tcgemm.transforms.fused import Fused
from jax_tcgemm.transforms.graph import Graph, Node, Value
from jax_tcgemm.transforms.heads import note_heads
from jax_tcgemm.transforms.neighbours import note_fallbacks, with_views
from jax_tcgemm.transforms.outputs import Flow, saved_bytes, written
from jax_tcgemm.transforms.products import compared, is_product
from jax_tcgemm.transforms.region import Program, Region
from jax_tcgemm.transforms.transposes import absorb_transposes
from jax_tcgemm.transforms.wiring import Wiring

# A kernel of two products has at most this many results. With more results, two kernels are faster:
# the second reads the first one's product (lab/fusion.md).
_MOST_OF_PAIR = 3

# A region is an optimizer's update if at least this many results replace arguments of their type.
# Kernels do not write results in place, so a step that donates its state would copy each of them.
# AdamW in the epilogue is not faster than XLA's own kernel (lab/fusion.md).
_UPDATES = 2

# At most this many operations of a region follow the product.
_MOST_MEMBERS = 100

# At most this many items are moved before a region.
_MOST_MOVED = 1000


def with_regions(graph: Graph) -> Graph:
    """Returns the graph with each product and its epilogue joined into one item."""
    items = with_caches(with_stored_weights(absorb_transposes(graph)))
    sliced = with_views(graph.sliced, items)
    note_fallbacks(items, sliced)
    note_heads(items)
    products = [x for x in items if is_product(x) and not x.is_sequence_last]
    wiring = Wiring(items, products, graph.returned)
    program = Program(
        wiring, frozenset(graph.arguments), graph.returned, graph.stacked, compared(items)
    )
    for product in products:
        if product not in wiring.position:
            continue
        kernel = _kernel_of(program, (product,))
        is_single = kernel is None or len(kernel.region.products) == 1
        if is_single and product.single_reason is not None:
            product.fallback_reason = product.single_reason
        elif kernel is not None:
            kernel.contract()
    joined = dataclasses.replace(graph, items=wiring.items, sliced=sliced)
    return dataclasses.replace(joined, items=joined.used())


def _kernel_of(program: Program, products: tuple[Node, ...]) -> _Kernel | None:
    """Returns the kernel of one or two products, ``None`` if there is nothing to gain."""
    kernel = _Kernel(program, Region(program, products, _MOST_MEMBERS))
    pair = kernel.region.partner() if len(products) == 1 else None
    if pair is not None:
        both = _kernel_of(program, (*products, pair))
        if both is not None and len(both.outputs) <= _MOST_OF_PAIR:
            return both
    while kernel.is_worthwhile and kernel.exceeds_limits():
        count = len(kernel.region.members)
        fewer = max(1, len(kernel.outputs) - MAX_RESULTS, count // 10)
        kernel = _Kernel(program, Region(program, products, count - fewer))
    return kernel if kernel.is_worthwhile and kernel.can_move() else None


class _Kernel:
    """A region that one kernel computes.

    Attributes:
        outputs: the values that the kernel writes.
        is_worthwhile: whether the kernel moves fewer bytes than separate kernels would, and is not
            an optimizer's update.
        required: items after the first product that must come before the kernel.
        saved_bytes: as in ``Fused``.
    """

    def __init__(self, program: Program, region: Region):
        self.program, self.wiring, self.region = program, program.wiring, region
        self.outputs: list[Value] = []
        self.required: set[Any] = set()
        self.saved_bytes = 0
        self.is_worthwhile = bool(region.members or region.sums) and self.choose_outputs()

    def choose_outputs(self) -> bool:
        """Sets the values to write; returns true if the region is worthwhile."""
        own = {*self.region.members, *self.region.sums}
        made = [x for node in self.region.members for x in node.outputs]
        hard: list[Value] = []
        soft: list[Value] = []
        outside: set[Any] = set()
        for value in [*self.region.accumulators, *made]:
            users = [item for item in self.wiring.users_of(value) if item not in own]
            stays = value in self.program.returned and value not in self.program.stacked
            if stays or not all(self.region.is_soft_user(user, value) for user in users):
                hard.append(value)
            elif users or value in self.program.returned:
                soft.append(value)
                outside.update(users or [value])
        # XLA most likely computes the other users in one or two kernels.
        values, flow = self.flow(made, hard, soft, min(len(outside), 2))
        chosen = written(flow)
        self.outputs = [values[i] for i in chosen or ()]
        self.outputs += [x for node in self.region.sums for x in node.outputs]
        if chosen is None or self.updates() >= _UPDATES:
            return False
        self.saved_bytes = saved_bytes(flow, chosen)
        return True

    def updates(self) -> int:
        """Returns how many written matrices replace arguments of the program."""
        region, program = self.region, self.program
        arguments = [
            leaf.aval
            for leaf in region.leaves
            if region.is_large(leaf) and leaf in program.arguments
        ]
        count = 0
        for value in self.outputs:
            if value in program.returned and value.aval in arguments:
                arguments.remove(value.aval)
                count += 1
        return count

    def flow(
        self, made: list[Value], hard: list[Value], soft: list[Value], kernels: int
    ) -> tuple[list[Value], Flow]:
        """Returns the values of the region, and a ``Flow`` that refers to them by number."""
        pulled = self.region.ordered(self.region.pulled)
        makers = {x: node for node in (*self.region.members, *pulled) for x in node.outputs}
        values = list(dict.fromkeys([*self.region.accumulators, *makers, *self.region.leaves]))
        number = {value: i for i, value in enumerate(values)}

        def numbers(some: Iterable[Value]) -> tuple[int, ...]:
            return tuple([number[x] for x in some])

        flow = Flow(
            sizes=tuple([x.bytes if self.region.is_large(x) else 0 for x in values]),
            made_of=tuple([numbers(makers[x].taken) if x in makers else None for x in values]),
            products=len(self.region.accumulators),
            choices=numbers(made),
            hard=numbers(hard),
            soft=numbers(soft),
            kernels=kernels,
            reduced=numbers(node.taken[0] for node in self.region.sums),
        )
        return values, flow

    def exceeds_limits(self) -> bool:
        """Returns true if the region has more operands or results than a kernel can have."""
        leaves = self.region.external(self.needed())
        matrices = [x for x in (*leaves, *self.outputs) if self.region.is_large(x)]
        return (
            len(leaves) > MAX_OPERANDS
            or len(self.outputs) > MAX_RESULTS
            or sum(matrix_bytes(x.aval.dtype.itemsize) for x in matrices) > MOST_WARP_BYTES
        )

    def can_move(self) -> bool:
        """Returns true if all items that the kernel requires can move before it.

        None of them may belong to the kernel, and none may have effects. Sets ``required``.
        """
        makers = [self.wiring.makers.get(x) for x in self.region.leaves]
        ahead = {
            x for x in makers if x is not None and self.wiring.position[x] >= self.region.start
        }
        before = self.wiring.before([*ahead, *self.region.products], self.region.start, _MOST_MOVED)
        if before is None:
            return False
        self.required = ahead | before
        own = {*self.region.products, *self.region.members, *self.region.sums}
        return self.required.isdisjoint(own) and not any(x.has_effects for x in self.required)

    def contract(self) -> None:
        """Puts the region into the graph as one item."""
        needed = self.needed()
        taken = self.region.external(needed)
        first, *others = self.region.products
        factors = [*first.inputs, *(other.inputs[1] for other in others)]
        assert self.region.form is not None
        fused = Fused(
            self.region.products,
            self.region.form,
            len(factors),
            tuple(self.region.accumulators),
            tuple(needed),
            (*factors, *taken),
            tuple(self.outputs),
            self.saved_bytes,
        )
        # The other nodes stay for their users outside; they read the values that the kernel writes.
        made = set(self.outputs)
        gone = [node for node in needed if not made.isdisjoint(node.outputs)]
        self.wiring.join([*self.region.products, *gone], fused, self.required, self.region.start)
        for answers in self.program.answers.values():
            answers.too_long.clear()  # a cone ends at what a kernel writes

    def needed(self) -> list[Node]:
        """Returns the nodes that the outputs need, in order."""
        wanted = set(self.outputs)
        own = {*self.region.members, *self.region.sums, *self.region.pulled}
        kept: list[Node] = []
        for node in self.region.ordered(own)[::-1]:
            if not wanted.isdisjoint(node.outputs):
                wanted.update(node.taken)
                kept.append(node)
        return kept[::-1]
