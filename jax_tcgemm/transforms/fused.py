"""A product with what becomes of it, as one item of a graph."""

from __future__ import annotations

import dataclasses

from jax_tcgemm.transforms.graph import Atom, Item, Node, Value
from jax_tcgemm.transforms.matrix_form import MatrixForm, RaggedForm


@dataclasses.dataclass(eq=False)
class Fused(Item):
    """A product, or two of one operand, and what becomes of it.

    Attributes:
        products: the nodes of ``dot_general``, or of one ``ragged_dot_general``.
        form: how this package computes each.
        factors: how many operands the products have: a gated one ``lhs`` and two ``rhs``, one over
            groups ``lhs``, ``rhs`` and ``group_sizes``.
        accumulators: their results.
        nodes: what is computed of them, in order.
        inputs: the factors, and what ``nodes`` read beside.
        outputs: what is used elsewhere.
        saved_bytes: how many bytes fewer are moved than if XLA computed the nodes.
    """

    products: tuple[Node, ...]
    form: MatrixForm | RaggedForm
    factors: int
    accumulators: tuple[Value, ...]
    nodes: tuple[Node, ...]
    inputs: tuple[Atom, ...]
    outputs: tuple[Value, ...]
    saved_bytes: int = 0

    @property
    def leaves(self) -> tuple[Atom, ...]:
        """What ``nodes`` read beside the products."""
        return self.inputs[self.factors :]

    def apart(self) -> list[Node]:
        """Returns nodes that compute the same one by one.

        What they give beside the outputs are values of their own, since nodes for others may stay.
        """
        values = {value: value for value in self.outputs}

        def own(atom: Atom) -> Atom:
            return values.get(atom, atom) if isinstance(atom, Value) else atom

        nodes = []
        for node in (*self.products, *self.nodes):
            for value in node.outputs:
                values.setdefault(value, Value(value.aval))
            inputs, outputs = tuple(map(own, node.inputs)), tuple(map(own, node.outputs))
            nodes.append(dataclasses.replace(node, inputs=inputs, outputs=outputs))
        return nodes
