"""How the transpose of an epilogue's derivative is divided.

Each device computes its part of the matrices, and reductions over rows or columns are joined over
devices before they are rounded.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_tcgemm.epilogue import function as functions
from jax_tcgemm.epilogue import portable, translation
from jax_tcgemm.epilogue.function import EpilogueFunction
from jax_tcgemm.epilogue.linear import LinearSpec
from jax_tcgemm.epilogue.part import Part
from jax_tcgemm.epilogue.portable import Joined, Number, Operation, PortableFunction
from jax_tcgemm.lowering.jit_pass import PassSpec
from jax_tcgemm.partitioning.rules import Rule
from jax_tcgemm.partitioning.shard import Shard
from jax_tcgemm.partitioning.work import Array, Work


@dataclasses.dataclass(frozen=True)
class DividedPass:
    """The transpose in the form that the custom call carries.

    Attributes:
        function: the transpose. Its accumulators are its first arguments that are whole matrices.
        names: names of the matrices' dimensions.
        cotangents: how many of them are cotangents, if all cotangents are whole matrices; else 0.
    """

    function: PortableFunction
    names: tuple[str, ...]
    cotangents: int

    @property
    def summed(self) -> tuple[str, ...]:
        """The names along which values are joined that padding could change."""
        return tuple({name: None for each in self.function.joined for name in each.over})

    @property
    def is_linear(self) -> bool:
        """Returns true if rows of zeros in the cotangents change no joined value."""
        return self.cotangents > 0 and all(x.join == "Sum" for x in self.function.joined)


_Apply = Callable[[Sequence[jax.Array], PassSpec], list[jax.Array]]


def rule(apply: _Apply) -> Rule:
    """Returns the rule of ``pullback_p``; ``apply`` computes a function in one pass."""
    local = functools.partial(_local, apply)
    classes = (DividedPass, PortableFunction, Operation, Number, Joined)
    return Rule(_accepts, _work, local, classes, _told)


def _divided(spec: LinearSpec) -> DividedPass | str:
    """Returns the transpose with named dimensions, or why they cannot be named."""
    names = (*(f"batch{i}" for i in range(len(spec.shape) - 2)), "m", "n")
    pullback, held = spec.transposed()
    whole = [x.shape == spec.shape for x in pullback.types]
    count = [*whole, False].index(False)
    if held or len(spec.shape) < 2 or count == 0:
        return "no cotangent of a whole matrix" if count == 0 else "arrays of a backward rule"
    function = portable.portable(EpilogueFunction(pullback.jaxpr, count), names)
    cotangents = len(spec.tangent.results)
    return (
        function
        if isinstance(function, str)
        else DividedPass(function, names, cotangents if cotangents <= count else 0)
    )


def _accepts(spec: LinearSpec, types: Sequence[Any]) -> bool:
    """Checks if each device can compute a part; XLA divides all else itself."""
    if spec.has_opaque_rule or not all(x.size for x in types):
        return False
    if isinstance(translation.translate(spec.pullback, spec.shape), str):
        return False
    return not isinstance(_divided(spec), str)


def _told(spec: LinearSpec) -> DividedPass:
    divided = _divided(spec)
    assert isinstance(divided, DividedPass)
    return divided


def _work(spec: DividedPass, types: Sequence[Any]) -> Work:
    function = spec.function
    size = types[0].dtype.itemsize
    operands = tuple(
        Array(portable.dim_names(dims), x.dtype.itemsize, f"operand {i}")
        for i, (dims, x) in enumerate(zip(function.arguments, types, strict=True))
    )
    return Work(
        extents=dict(zip(spec.names, types[0].shape, strict=True)),
        operands=operands,
        product=Array(spec.names, size, "the cotangent"),
        results=tuple(
            Array(portable.dim_names(dims), size, "the result") for dims in function.result_dims
        ),
        factors=frozenset(i for i, x in enumerate(operands) if x.dims == spec.names),
        operations=0,
        whole=frozenset() if spec.is_linear else frozenset(spec.summed),
    )


def _local(apply: _Apply, shard: Shard, spec: DividedPass, *operands: jax.Array) -> list[jax.Array]:
    function = spec.function
    extents = {name: shard.plan.part(name) for name in spec.names}
    part = Part(function, extents, {name: shard.start(name) for name in spec.names})
    padded = [name for name in spec.summed if not shard.plan.is_even(name)]
    own = [_without_padding(shard, spec, i, x, padded) for i, x in enumerate(operands)]
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in own]
    within, held = functions.trace(part.within, types, 0)
    made = apply([*own, *held], PassSpec(within, tuple(extents.values())))

    def joined(x: jax.Array, names: Sequence[str], join: str) -> jax.Array:
        for name in set(names).intersection(padded):  # a part may be nothing but padding
            x = jnp.where(shard.left(name) > 0, x, jnp.zeros_like(x))
        return shard.joined(x, names, join)

    return part.after(part.joined(made, joined), own[function.accumulators :])


def _without_padding(
    shard: Shard, spec: DividedPass, index: int, x: jax.Array, padded: Sequence[str]
) -> jax.Array:
    """Replaces padding by zeros in cotangents, and by the part's first row in other operands.

    The derivative at the first row times zero is zero, or what that row adds to the sum anyway.
    """
    for axis, name in enumerate(spec.function.arguments[index]):
        if name in padded:
            first = jax.lax.slice_in_dim(x, 0, 1, axis=axis)
            filler = jnp.zeros_like(first) if index < spec.cotangents else first
            x = shard.without_padding(x, axis, str(name), filler)
    return x
