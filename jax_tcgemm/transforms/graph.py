"""A jaxpr as a list of nodes that can be moved, without the calls of ``jit`` in it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax.extend import core

from jax_tcgemm._compat import jaxprs


@dataclasses.dataclass(eq=False)
class Value:
    """What a node, or a caller, gives."""

    aval: Any

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return getattr(self.aval, "shape", ())

    @property
    def dtype(self) -> Any:
        """Its type; ``None`` of what is no array."""
        return getattr(self.aval, "dtype", None)

    @functools.cached_property
    def bytes(self) -> int:
        """What it takes in memory, ``0`` where that is not known."""
        size = getattr(self.dtype, "itemsize", 0)
        for extent in self.shape:
            size *= extent if isinstance(extent, int) else 0
        return size


# What a node takes: a value, or a number that the jaxpr holds.
Atom = Any


class Item:
    """What has inputs and outputs.

    Attributes:
        inputs: what it takes.
        outputs: what it gives.
    """

    inputs: tuple[Atom, ...]
    outputs: tuple[Value, ...]

    @functools.cached_property
    def taken(self) -> list[Value]:
        """Those of its inputs that are no literals."""
        return [x for x in self.inputs if isinstance(x, Value)]

    @property
    def has_effects(self) -> bool:
        """Whether it does anything but give its outputs."""
        return False


@dataclasses.dataclass(eq=False)
class Node(Item):
    """An equation.

    Attributes:
        eqn: the equation, whose variables mean nothing.
        inputs: what it takes.
        outputs: what it gives.
        within: the calls of ``jit`` that it was inlined from, the outermost first.
    """

    eqn: Any
    inputs: tuple[Atom, ...]
    outputs: tuple[Value, ...]
    within: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        """Of its primitive."""
        return self.eqn.primitive.name

    @property
    def params(self) -> Mapping[str, Any]:
        """Those of its primitive."""
        return self.eqn.params

    @property
    def has_effects(self) -> bool:
        """Whether it does anything but give its outputs."""
        return bool(self.eqn.effects)


@dataclasses.dataclass
class Graph:
    """A jaxpr, without calls of ``jit`` that do nothing but call.

    Attributes:
        arguments: what it is given.
        constants: arrays that it holds.
        items: what is computed, each item after those whose outputs it takes.
        results: what it returns.
        stacked: the results that a caller copies into an array of many, as ``scan`` does.
    """

    arguments: list[Value]
    constants: dict[Value, Any]
    items: list[Any]
    results: list[Atom]
    stacked: frozenset[Value] = frozenset()

    @functools.cached_property
    def returned(self) -> frozenset[Value]:
        """Its results that are no literals."""
        return frozenset(x for x in self.results if isinstance(x, Value))

    def used(self) -> list[Any]:
        """Returns the items that the results, or effects, need."""
        wanted = {x for x in self.results if isinstance(x, Value)}
        kept = []
        for item in reversed(self.items):
            if item.has_effects or not wanted.isdisjoint(item.outputs):
                wanted.update(item.taken)
                kept.append(item)
        return kept[::-1]


def graph_of(jaxpr: Any, consts: Sequence[Any], is_stacked: Sequence[bool] = ()) -> Graph:
    """Returns the nodes of a jaxpr.

    Args:
        jaxpr: without its constants.
        consts: those.
        is_stacked: of each result, whether it is one of those that a caller stacks.
    """
    arguments = [Value(var.aval) for var in jaxpr.invars]
    constants: dict[Value, Any] = {}
    items: list[Node] = []
    results = _add(jaxpr, consts, arguments, constants, items, ())
    pairs = [*zip(results, is_stacked, strict=False)]
    kept = {x for x, is_one in pairs if not is_one and isinstance(x, Value)}
    stacked = {x for x, is_one in pairs if is_one and isinstance(x, Value)}
    return Graph(arguments, constants, items, results, frozenset(stacked - kept))


def _add(
    jaxpr: Any,
    consts: Sequence[Any],
    arguments: Sequence[Atom],
    constants: dict[Value, Any],
    items: list[Node],
    within: tuple[Any, ...],
) -> list[Atom]:
    """Adds the nodes of a jaxpr that is given such arguments, and returns its results."""
    env: dict[Any, Atom] = dict(zip(jaxpr.invars, arguments, strict=True))
    for var, const in zip(jaxpr.constvars, consts, strict=True):
        env[var] = Value(var.aval)
        constants[env[var]] = const

    def read(atom: Any) -> Atom:
        return atom if isinstance(atom, core.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        inputs = tuple(map(read, eqn.invars))
        called = jaxprs.plain_call(eqn)
        if called is None:
            outputs = tuple(Value(var.aval) for var in eqn.outvars)
            items.append(Node(eqn, inputs, outputs, within))
        else:
            inner, inner_consts = called
            outputs = _add(inner, inner_consts, inputs, constants, items, (*within, eqn))
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [*map(read, jaxpr.outvars)]


def inner_nodes(eqn: Any, names: frozenset[str]) -> Iterator[Any]:
    """Yields an equation, or those within it, at any depth.

    Args:
        eqn: the equation.
        names: of the primitives that are looked into.
    """
    if eqn.primitive.name not in names:
        yield eqn
        return
    params = eqn.params.values()
    every = [x for value in params for x in (value if type(value) is tuple else (value,))]
    for jaxpr in map(jaxprs.jaxpr_of, every):
        for each in () if jaxpr is None else jaxpr.eqns:
            yield from inner_nodes(each, names)


def evaluate(
    graph: Graph, values: Sequence[Any], apply: Callable[[Any, list[Any]], Sequence[Any]]
) -> list[Any]:
    """Computes the results of a graph.

    Args:
        graph: what is computed.
        values: the arguments.
        apply: computes the outputs of an item from its inputs.
    """
    env: dict[Value, Any] = dict(graph.constants)
    env.update(zip(graph.arguments, values, strict=True))

    def read(atom: Atom) -> Any:
        return env[atom] if isinstance(atom, Value) else atom.val

    last = {value: item for item in graph.items for value in item.taken}
    kept = {x for x in graph.results if isinstance(x, Value)}
    for item in graph.items:
        env.update(zip(item.outputs, apply(item, [*map(read, item.inputs)]), strict=True))
        for value in item.taken:  # outside of jit arrays take memory as long as they are here
            if last[value] is item and value not in kept:
                env.pop(value, None)
    return [*map(read, graph.results)]
