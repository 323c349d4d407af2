"""A jaxpr as a list of movable nodes, with its calls of ``jit`` inlined."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend import core

from jax_tcgemm._compat import jaxprs


class Value:
    """A result of a node, an argument or a constant.

    Attributes:
        aval: its type.
        shape: its shape; ``()`` if it is no array.
        dtype: its dtype; ``None`` if it is no array.
        bytes: its size in memory; ``0`` if that is not known.
        var: its variable in the graph's original jaxpr; ``None`` if it was inlined.
    """

    def __init__(self, aval: Any, var: Any = None):
        self.aval = aval
        self.shape: tuple[int, ...] = getattr(aval, "shape", ())
        self.dtype = getattr(aval, "dtype", None)
        self.var = var
        size = getattr(self.dtype, "itemsize", 0)
        for extent in self.shape:
            size *= extent if isinstance(extent, int) else 0
        self.bytes = size


# An input of a node: a value, or a literal of the jaxpr.
Atom = Any


class Item:
    """An operation of a graph: it has inputs and outputs.

    Attributes:
        inputs: the values and literals that it reads.
        outputs: the values that it computes.
        taken: the inputs that are no literals.
    """

    inputs: tuple[Atom, ...]
    outputs: tuple[Value, ...]
    taken: list[Value]

    def __post_init__(self) -> None:
        """Sets ``taken``."""
        self.taken = [x for x in self.inputs if isinstance(x, Value)]

    @property
    def has_effects(self) -> bool:
        """True if the item does more than compute its outputs."""
        return False


@dataclasses.dataclass(eq=False)
class Node(Item):
    """An equation.

    Attributes:
        eqn: the equation; ``inputs`` and ``outputs`` replace its variables.
        inputs: the values and literals that it reads.
        outputs: the values that it computes.
        scope: the name stack of the calls from which it was inlined; ``None`` outside any call.
        elementwise: the cached result of ``products.is_elementwise``; ``None`` before its first
            call.
        fallback_reason: why XLA should compute this product; ``None`` if it should not.
        plain_reason: why XLA should compute this product if it gets no epilogue, likewise.
        single_reason: why XLA should compute this product if no kernel joins it with another one.
        is_sequence_last: whether the kernel of this projection writes the sequence after the
            features; see ``heads``.
        stored: how the product reads an array that is stored in another form, as in ``dequantized``
            and ``caches``; ``None`` if it does not.
        name: the name of its primitive.
    """

    eqn: Any
    inputs: tuple[Atom, ...]
    outputs: tuple[Value, ...]
    scope: Any = None
    elementwise: bool | None = None
    fallback_reason: str | None = None
    plain_reason: str | None = None
    single_reason: str | None = None
    is_sequence_last: bool = False
    stored: Any = None
    name: str = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        """Caches the name, which is read often."""
        super().__post_init__()
        self.name = self.eqn.primitive.name

    @property
    def params(self) -> Mapping[str, Any]:
        """The parameters of the node's primitive."""
        return self.eqn.params

    @property
    def has_effects(self) -> bool:
        """True if the node does more than compute its outputs; ``free_ref`` has no outputs."""
        return bool(self.eqn.effects) or not self.outputs

    @functools.cached_property
    def context(self) -> tuple[Any, ...]:
        """Where and how the node is computed, see ``jaxprs.context_of``."""
        return jaxprs.context_of(self.eqn)


@dataclasses.dataclass
class Graph:
    """A jaxpr with its plain calls of ``jit`` inlined.

    Attributes:
        arguments: the values that the caller passes.
        constants: the arrays that the jaxpr holds.
        items: the nodes, each after those whose outputs it reads.
        results: the values and literals that it returns.
        stacked: the results that the caller copies into a stacked array, as ``scan`` does.
        sliced: the arguments that the caller slices out of a larger array, as ``scan`` does.
            ``with_regions`` adds their views.
    """

    arguments: list[Value]
    constants: dict[Value, Any]
    items: list[Any]
    results: list[Atom]
    stacked: frozenset[Value] = frozenset()
    sliced: frozenset[Value] = frozenset()

    @functools.cached_property
    def returned(self) -> frozenset[Value]:
        """The results that are no literals."""
        return frozenset(x for x in self.results if isinstance(x, Value))

    def used(self) -> list[Any]:
        """Returns the items that results or effects need."""
        wanted = set(self.returned)
        kept = []
        for item in reversed(self.items):
            if item.has_effects or not wanted.isdisjoint(item.outputs):
                wanted.update(item.taken)
                kept.append(item)
        return kept[::-1]


def graph_of(
    jaxpr: Any,
    consts: Sequence[Any],
    is_stacked: Sequence[bool] = (),
    is_sliced: Sequence[bool] = (),
) -> Graph:
    """Returns the graph of a jaxpr.

    Args:
        jaxpr: the operations, without constants.
        consts: the constants.
        is_stacked: for each result, whether the caller stacks it.
        is_sliced: for each argument, whether the caller slices it out of a larger array.
    """
    arguments = [Value(var.aval, var) for var in jaxpr.invars]
    inlining = _Inlining(not jaxprs.has_input_effects(jaxpr))
    results = inlining.add(jaxpr, consts, arguments, None)
    pairs = [*zip(results, is_stacked, strict=False)]
    kept = {x for x, is_one in pairs if not is_one and isinstance(x, Value)}
    stacked = {x for x, is_one in pairs if is_one and isinstance(x, Value)}
    return Graph(
        arguments,
        inlining.constants,
        inlining.items,
        results,
        frozenset(stacked - kept),
        frozenset(x for x, is_one in zip(arguments, is_sliced, strict=False) if is_one),
    )


class _Inlining:
    """The state of ``graph_of``.

    Attributes:
        may_add_constants: whether a call that holds arrays may be inlined.
        constants: the arrays found so far.
        items: the nodes found so far.
    """

    def __init__(self, may_add_constants: bool):
        self.may_add_constants = may_add_constants
        self.constants: dict[Value, Any] = {}
        self.items: list[Node] = []

    def add(
        self, jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Atom], scope: Any
    ) -> list[Atom]:
        """Adds the nodes of a jaxpr called with these arguments, and returns its results."""
        env: dict[Any, Atom] = dict(zip(jaxpr.invars, arguments, strict=True))
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            env[var] = Value(var.aval, var if scope is None else None)
            self.constants[env[var]] = const
        for eqn in jaxpr.eqns:
            inputs = tuple([x if isinstance(x, core.Literal) else env[x] for x in eqn.invars])
            called = jaxprs.plain_call(eqn)
            if called is None or (called[1] and not self.may_add_constants):
                kept = scope is None
                outputs = tuple([Value(x.aval, x if kept else None) for x in eqn.outvars])
                self.items.append(Node(eqn, inputs, outputs, scope))
            else:
                outputs = self.add(*called, inputs, jaxprs.scope_of_call(eqn, scope))
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [x if isinstance(x, core.Literal) else env[x] for x in jaxpr.outvars]


def inner_nodes(eqn: Any, names: frozenset[str]) -> Iterator[Any]:
    """Yields an equation, or the equations inside it at any depth.

    Args:
        eqn: the equation.
        names: the primitives whose inner equations are yielded instead.
    """
    if eqn.primitive.name not in names:
        yield eqn
        return
    params = eqn.params.values()
    every = [x for value in params for x in (value if type(value) is tuple else (value,))]
    for jaxpr in map(jaxprs.jaxpr_of, every):
        for each in () if jaxpr is None else jaxpr.eqns:
            yield from inner_nodes(each, names)
