"""A product and its epilogue as one item of a graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax_tcgemm.transforms.graph import Atom, Item, Node, Value
from jax_tcgemm.transforms.matrix_form import MatrixForm, RaggedForm


@dataclasses.dataclass(eq=False)
class Fused(Item):
    """A product, or two that share an operand, and the epilogue.

    Attributes:
        products: one or two ``dot_general`` nodes, or one ``ragged_dot_general`` node.
        form: how this package computes each product.
        factors: how many operands the products have. A gated product has ``lhs`` and two ``rhs``; a
            product over groups has ``lhs``, ``rhs`` and ``group_sizes``.
        accumulators: the results of the products.
        nodes: the operations of the epilogue, in order.
        inputs: the factors, then the other values that ``nodes`` read.
        outputs: the values that are used elsewhere.
        saved_bytes: how many bytes this saves compared to XLA computing the nodes.
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
        """The values that ``nodes`` read in addition to the products."""
        return self.inputs[self.factors :]

    def apart(self) -> list[Node]:
        """Returns separate nodes that compute the same outputs.

        Their intermediate results are new values, because the graph may still hold the original
        nodes for other users.
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


class _Equation:
    """An equation in the form that ``identity`` reads, with values instead of variables."""

    def __init__(self, invars: Sequence[Atom], outvars: Sequence[Atom], eqn: Any):
        self.invars, self.outvars = invars, outvars
        self.primitive, self.params, self.ctx = eqn.primitive, eqn.params, eqn.ctx


class _Jaxpr:
    """A jaxpr in the form that ``identity`` reads."""

    constvars = consts = ()

    def __init__(self, invars: Sequence[Atom], eqns: Sequence[_Equation], outvars: Sequence[Atom]):
        self.invars, self.eqns, self.outvars = invars, eqns, outvars


def as_jaxpr(item: Node | Fused) -> Any:
    """Returns an item in the form that ``identity`` reads."""
    nodes = (*item.products, *item.nodes) if isinstance(item, Fused) else (item,)
    eqns = [_Equation(node.inputs, node.outputs, node.eqn) for node in nodes]
    return _Jaxpr(item.inputs, eqns, item.outputs)
