"""Functions as named operations, for programs compiled elsewhere and for parts.

A jaxpr consists of JAX objects, and its operations hold the extents that it was traced for. Here
the product's axes have names instead of extents, so that each device computes the same operations
on its part. A portable function consists of numbers and text only, so that a program over several
devices can carry it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm._compat import jaxprs
from jax_tcgemm.epilogue import rng
from jax_tcgemm.epilogue.axes import Axes, NotDivisibleError
from jax_tcgemm.epilogue.function import EpilogueFunction
from jax_tcgemm.epilogue.program import JOINS
from jax_tcgemm.epilogue.tanh import is_literal
from jax_tcgemm.epilogue.values import following
from jax_tcgemm.problem.exact import ComparedExactly

# The name of each axis, or its extent if it is no axis of the product.
Dims = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Number(ComparedExactly):
    """An operand that is a known number."""

    value: int | float | bool
    dtype: Any


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation.

    Attributes:
        name: name of the JAX primitive.
        operands: numbers, and indices of values. The values of the arguments come first, then one
            value for each operation.
        parameters: the parameters that ``_PARAMETERS`` names.
        dims: dimensions of the result.
    """

    name: str
    operands: tuple[int | Number, ...]
    parameters: tuple[Any, ...]
    dims: Dims


@dataclasses.dataclass(frozen=True)
class Joined:
    """A reduction over axes of the product; each device has a part of these axes.

    Attributes:
        value: index of its result.
        over: names of the axes.
        join: how parts are joined, as ``JOINS`` names it.
    """

    value: int
    over: tuple[str, ...]
    join: str


@dataclasses.dataclass(frozen=True)
class PortableFunction:
    """A function of accumulators and operands.

    Attributes:
        accumulators: how many arguments are accumulators.
        arguments: dimensions of each argument.
        operations: the operations, in their order.
        results: numbers, or indices of values.
        result_dims: dimensions of the results.
        joined: the reductions over axes of the product.
    """

    accumulators: int
    arguments: tuple[Dims, ...]
    operations: tuple[Operation, ...]
    results: tuple[int | Number, ...]
    result_dims: tuple[Dims, ...]
    joined: tuple[Joined, ...]

    def following(self, values: Iterable[int]) -> set[int]:
        """Returns the given values and all values that depend on them."""
        found = set(values)
        for number, operation in enumerate(self.operations, len(self.arguments)):
            if found.intersection(x for x in operation.operands if isinstance(x, int)):
                found.add(number)
        return found

    @functools.cached_property
    def made_within(self) -> tuple[int, ...]:
        """Values computed from the accumulators: results, then reductions to be joined."""
        dependent = self.following(range(self.accumulators))
        later = self.following(each.value for each in self.joined)
        # Random results of the product's shape are computed here, too, so nothing is drawn twice.
        operations = enumerate(self.operations, len(self.arguments))
        drawn = self.following(i for i, each in operations if each.name == "random_bits")
        whole = self.arguments[0]
        results = (
            x
            for x, dims in zip(self.results, self.result_dims, strict=True)
            if isinstance(x, int) and x not in later
            if x in dependent or (x in drawn and dims == whole)
        )
        return (*dict.fromkeys(results), *(each.value for each in self.joined))


@functools.lru_cache(maxsize=256)
def portable(function: EpilogueFunction, names: tuple[str, ...]) -> PortableFunction | str:
    """Returns a function with named axes, or why its axes cannot be named.

    Args:
        function: an epilogue.
        names: names of the accumulators' axes.
    """
    flat = function.flat
    if flat.jaxpr.effects or flat.consts:
        return "effects or constants"
    jaxpr, _ = jaxprs.without_unused(flat.jaxpr, len(flat.jaxpr.invars))
    try:
        for eqn in jaxpr.eqns:
            _check_place(eqn)
            _check_draws(eqn)
        axes = Axes(jaxpr, function.accumulators, names)
        for eqn in jaxpr.eqns:
            _check_keys(eqn, axes)
        return _portable(jaxpr, function.accumulators, axes)
    except NotDivisibleError as error:
        return str(error)


def dim_names(dims: Dims) -> tuple[str | None, ...]:
    """The names of dimensions, None for one of a fixed size."""
    return tuple(dim if isinstance(dim, str) else None for dim in dims)


def _portable(jaxpr: Any, accumulators: int, axes: Axes) -> PortableFunction:
    numbers = {var: i for i, var in enumerate(jaxpr.invars)}
    numbers |= {eqn.outvars[0]: i for i, eqn in enumerate(jaxpr.eqns, len(numbers))}

    def atom(x: Any) -> int | Number:
        return _number(x) if is_literal(x) else numbers[x]

    reduced = _reduced(jaxpr, accumulators, axes)
    return PortableFunction(
        accumulators,
        tuple(map(axes.of, jaxpr.invars)),
        tuple(
            Operation(
                eqn.primitive.name,
                tuple(map(atom, eqn.invars)),
                _parameters(eqn),
                axes.of(eqn.outvars[0]),
            )
            for eqn in jaxpr.eqns
        ),
        tuple(map(atom, jaxpr.outvars)),
        tuple(() if is_literal(x) else axes.of(x) for x in jaxpr.outvars),
        tuple(Joined(numbers[x], over, join) for x, (over, join) in reduced.items()),
    )


def _check_place(eqn: Any) -> None:
    """Raises an error if an operation is to be computed elsewhere (``compute_on``)."""
    place, *_ = jaxprs.context_of(eqn)
    if place is not None:
        raise NotDivisibleError(f"{eqn.primitive.name} on {place}")


def _check_draws(eqn: Any) -> None:
    """Raises an error if a device cannot draw its part of random numbers."""
    name = eqn.primitive.name
    types = [x.aval for x in (*eqn.invars, *eqn.outvars)]
    for each in types:
        is_key = jnp.issubdtype(each.dtype, jax.dtypes.extended)
        if is_key and (each.shape or not rng.is_key(each.dtype)):
            raise NotDivisibleError(f"{name} of {each.str_short()}")
    if name == "random_bits":
        width, shape = eqn.params["bit_width"], eqn.params["shape"]
        if width > 32:
            raise NotDivisibleError(f"random_bits of {width} bits")
        if not rng.is_partitionable(eqn) or math.prod(shape) >= 2**32:
            raise NotDivisibleError("random_bits that are no function of each count alone")


def _check_keys(eqn: Any, axes: Axes) -> None:
    """Raises an error if the words of a key are an axis of the product."""
    words = {"random_wrap": eqn.invars, "random_unwrap": eqn.outvars}.get(eqn.primitive.name, [])
    if any(isinstance(dim, str) for x in words for dim in axes.of(x)):
        raise NotDivisibleError(f"{eqn.primitive.name} along an axis of the product")


def _reduced(jaxpr: Any, accumulators: int, axes: Axes) -> dict[Any, tuple[tuple[str, ...], str]]:
    """Returns reductions to be joined over devices: over which axes, and how."""
    dependent = following(jaxpr.invars[:accumulators], jaxpr)
    reduced: dict[Any, tuple[tuple[str, ...], str]] = {}
    later: set[Any] = set()
    for eqn in jaxpr.eqns:
        name, (result, *_) = eqn.primitive.name, eqn.outvars
        values = [x for x in eqn.invars if not is_literal(x)]
        over: tuple[str, ...] = ()
        if name in JOINS and values:
            dims = axes.of(values[0])
            over = tuple(d for d in (dims[i] for i in eqn.params["axes"]) if isinstance(d, str))
        if any(x in later for x in values):
            if over or any(x in dependent and x not in later for x in values):
                raise NotDivisibleError(f"{name} of what was reduced and of what was not")
            later.add(result)
        elif over:
            if values[0] not in dependent:
                raise NotDivisibleError(f"{name} of an operand")
            reduced[result] = over, JOINS[name]
            later.add(result)
    return reduced


def _number(literal: Any) -> Number:
    if literal.aval.shape:
        raise NotDivisibleError("an array as a literal")
    dtype = np.dtype(literal.aval.dtype)
    value = np.asarray(literal.val).astype(dtype)
    if value != value and value.tobytes() != np.asarray(math.nan, dtype).tobytes():
        raise NotDivisibleError("a NaN other than the usual one, which no text holds")
    return Number(value.item(), dtype)


# JAX's parameters that define an operation, beside the shape of its result.
_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "integer_pow": ("y",),
    "round": ("rounding_method",),
    "convert_element_type": ("new_dtype",),
    "bitcast_convert_type": ("new_dtype",),
    "reduce_precision": ("exponent_bits", "mantissa_bits"),
    "broadcast_in_dim": ("broadcast_dimensions",),
    "transpose": ("permutation",),
    "iota": ("dtype", "dimension"),
    "random_bits": ("bit_width", "shape"),
    **dict.fromkeys(JOINS, ("axes",)),
}


def _parameters(eqn: Any) -> tuple[Any, ...]:
    names = _PARAMETERS.get(eqn.primitive.name, ())
    values = (eqn.params[name] for name in names)
    return tuple(
        tuple(map(int, value))
        if isinstance(value, tuple)
        else np.dtype(value)
        if name.endswith("dtype")
        else int(value)
        for name, value in zip(names, values, strict=True)
    )
