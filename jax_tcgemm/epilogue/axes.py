"""Matches the axes of a function's values with the named axes of the product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jax_tcgemm._compat import jaxprs
from jax_tcgemm.epilogue import operations
from jax_tcgemm.epilogue.program import JOINS
from jax_tcgemm.epilogue.rng import KEYS
from jax_tcgemm.epilogue.tanh import is_literal


class NotDivisibleError(Exception):
    """A function cannot be computed in parts; the message names the reason."""


class Axes:
    """The axes of every variable of a jaxpr; axes that correspond are merged."""

    def __init__(self, jaxpr: Any, accumulators: int, names: Sequence[str]):
        """Follows the axes through the operations.

        Args:
            jaxpr: a jaxpr without calls.
            accumulators: how many of its first arguments are accumulators.
            names: names of the accumulators' axes.

        Raises:
            NotDivisibleError: the axes cannot be followed through an operation, or one axis
                would have two names.
        """
        self._above: dict[tuple[Any, int], tuple[Any, int]] = {}
        for eqn in jaxpr.eqns:
            for operand, axis, own in _links(eqn):
                self._merge((operand, axis), (eqn.outvars[0], own))
        self._names: dict[tuple[Any, int], str] = {}
        for accumulator in jaxpr.invars[:accumulators]:
            for axis, name in enumerate(names):
                top = self._top((accumulator, axis))
                if self._names.setdefault(top, name) != name:
                    raise NotDivisibleError(f"{name} is {self._names[top]}, too")

    def of(self, atom: Any) -> tuple[Any, ...]:
        """Returns each axis's name, or its extent if it is no axis of the product.

        Raises:
            NotDivisibleError: two axes have the same name; no device has a part of such a value.
        """
        tops = (self._top((atom, axis)) for axis in range(len(atom.aval.shape)))
        pairs = zip(tops, atom.aval.shape, strict=True)
        dims = tuple(self._names.get(top, extent) for top, extent in pairs)
        names = [name for name in dims if isinstance(name, str)]
        if len(set(names)) < len(names):
            raise NotDivisibleError(f"axes {names} of one value")
        return dims

    def _top(self, axis: tuple[Any, int]) -> tuple[Any, int]:
        while axis in self._above:
            axis = self._above[axis]
        return axis

    def _merge(self, one: tuple[Any, int], other: tuple[Any, int]) -> None:
        one, other = self._top(one), self._top(other)
        if one != other:
            self._above[one] = other


def _links(eqn: Any) -> Iterator[tuple[Any, int, int]]:
    """Yields each operand, one of its axes, and the same axis of the result."""
    result, *others = eqn.outvars
    if others:
        raise NotDivisibleError(eqn.primitive.name)
    for operand in eqn.invars:
        if not is_literal(operand):
            for axis, own in _kept(eqn, operand.aval.shape, result.aval.shape):
                if operand.aval.shape[axis] == result.aval.shape[own]:
                    yield operand, axis, own


def _kept(eqn: Any, old: tuple[int, ...], new: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yields pairs of corresponding axes: the operand's, then the result's."""
    name, params = eqn.primitive.name, eqn.params
    if name == "broadcast_in_dim":
        return enumerate(params["broadcast_dimensions"])
    if name == "transpose":
        return ((axis, own) for own, axis in enumerate(params["permutation"]))
    if name in JOINS:
        kept = (axis for axis in range(len(old)) if axis not in params["axes"])
        return zip(kept, range(len(new)), strict=True)
    if name in jaxprs.VIEWS:
        before, after = ([i for i, x in enumerate(shape) if x != 1] for shape in (old, new))
        if [old[i] for i in before] != [new[i] for i in after]:
            raise NotDivisibleError(f"{name} of {old} to {new}")
        return zip(before, after, strict=True)
    if name in KEYS or name == "random_bits":
        return iter(())
    if name not in operations.ELEMENTWISE:
        raise NotDivisibleError(name)
    return zip(range(len(old)), range(len(new)), strict=bool(old))
