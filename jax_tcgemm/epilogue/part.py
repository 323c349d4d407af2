"""Computes a device's part of a function, with JAX operations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm.epilogue import rng
from jax_tcgemm.epilogue.operations import ELEMENTWISE
from jax_tcgemm.epilogue.portable import Dims, Number, Operation, PortableFunction
from jax_tcgemm.epilogue.program import JOINS
from jax_tcgemm.problem.strides import row_major


@dataclasses.dataclass(frozen=True)
class Part:
    """A device's part of the values of a function.

    Attributes:
        function: the function.
        extents: extents of the part, by axis name.
        starts: where the part begins, by axis name: an array, or 0.
    """

    function: PortableFunction
    extents: Mapping[str, int]
    starts: Mapping[str, Any]

    def within(self, *arguments: Any) -> list[Any]:
        """Computes ``PortableFunction.made_within``: values before reductions are joined."""
        return self._evaluated(dict(enumerate(arguments)), self.function.made_within)

    def joined(self, made: Sequence[Any], join: Callable[..., Any]) -> list[Any]:
        """Joins the reductions among the values that ``within`` returned.

        Args:
            made: the values.
            join: joins the devices' parts of a value, given the axes and the name of the join.
        """
        joined = {each.value: each for each in self.function.joined}
        return [
            join(value, joined[which].over, joined[which].join) if which in joined else value
            for which, value in zip(self.function.made_within, made, strict=True)
        ]

    def after(self, made: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        """Computes the results.

        Args:
            made: the values that ``within`` returned, with the reductions joined.
            operands: operands of the function, without the accumulators.
        """
        known = dict(enumerate(operands, self.function.accumulators))
        known |= dict(zip(self.function.made_within, made, strict=True))
        return self._evaluated(known, self.function.results)

    def _evaluated(self, known: dict[int, Any], wanted: Sequence[int | Number]) -> list[Any]:
        """Computes the wanted values from the known ones."""
        function, count = self.function, len(self.function.arguments)
        needed = {x for x in wanted if isinstance(x, int)}
        for i in reversed(range(len(function.operations))):
            if count + i in needed - known.keys():
                needed.update(x for x in function.operations[i].operands if isinstance(x, int))

        def read(operand: int | Number) -> Any:
            if isinstance(operand, Number):
                return np.asarray(operand.value, operand.dtype)[()]
            return known[operand]

        for i, operation in enumerate(function.operations, count):
            if i in needed - known.keys():
                known[i] = self._applied(operation, [*map(read, operation.operands)])
        return [jnp.asarray(read(x)) for x in wanted]

    def _applied(self, operation: Operation, values: Sequence[Any]) -> Any:
        name, parameters = operation.name, operation.parameters
        if name in ELEMENTWISE:
            return elementwise(name)(*values, *parameters)
        if name in rng.KEYS:
            return rng.KEYS[name](*values)
        if name == "transpose" or name in JOINS:
            return getattr(lax, name)(*values, *parameters)
        shape = tuple(self.extents[x] if isinstance(x, str) else x for x in operation.dims)
        if name == "broadcast_in_dim":
            (x,), (axes,) = values, parameters
            return lax.broadcast_in_dim(x, shape, axes)
        if name == "iota":
            dtype, axis = parameters
            return self._counted(operation.dims, shape, dtype, axis)
        if name == "random_bits":
            return self._drawn(operation, shape, *values)
        (x,) = values
        return lax.reshape(x, shape)

    def _drawn(self, operation: Operation, shape: tuple[int, ...], key: jax.Array) -> Any:
        """Draws the device's part of the whole array of ``jax.random.bits``."""
        width, whole = operation.parameters
        counts = jnp.zeros(shape, jnp.uint32)
        for axis, stride in enumerate(row_major(whole)):
            along = self._counted(operation.dims, shape, jnp.dtype(jnp.uint32), axis)
            counts = counts + along * np.uint32(stride)
        return rng.bits(key, counts, width)

    def _counted(self, dims: Dims, shape: tuple[int, ...], dtype: Any, axis: int) -> Any:
        """Returns each element's index along an axis of the whole array."""
        name = dims[axis]
        start = self.starts[name] if isinstance(name, str) else 0
        if isinstance(start, int):  # 0
            return lax.broadcasted_iota(dtype, shape, axis)
        place = lax.broadcasted_iota(jnp.int32, shape, axis) + start
        return lax.convert_element_type(place, dtype)


_IDENTITIES = frozenset({"copy", "copy_p", "name", "stop_gradient", "optimization_barrier"})
_ALIASES: Mapping[str, str] = {
    "add_any": "add",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "not": "bitwise_not",
}


def elementwise(name: str) -> Callable[..., Any]:
    """Returns a function that computes an elementwise operation."""
    if name in _IDENTITIES:
        return lambda x: x
    if name == "one_minus_square":
        return lambda x: (1 - x) * (1 + x)
    if name == "polynomial":
        # Older JAX has no such operation, and no name for it.
        return lambda x, *coefficients: getattr(lax, name)(x, coefficients)
    if name == "round":
        return lambda x, method: lax.round(x, lax.RoundingMethod(method))
    return getattr(lax, _ALIASES.get(name, name))
