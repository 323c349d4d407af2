"""``LinearSpec``: the derivative of an epilogue at known values, and its transpose."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_tcgemm import _compat
from jax_tcgemm.epilogue import function as functions
from jax_tcgemm.epilogue.function import EpilogueFunction
from jax_tcgemm.problem.activations import Activation, resolve
from jax_tcgemm.problem.arithmetic import accumulator_dtype


@dataclasses.dataclass(frozen=True)
class LinearSpec:
    """The linear derivative of an epilogue, and the shape of the products.

    Attributes:
        tangent: function of the slopes and the values, linear in the slopes; returns tangents.
        slopes: the number of slopes.
        shape: shape of the products, ``(..., m, n)``.
    """

    tangent: EpilogueFunction
    slopes: int
    shape: tuple[int, ...]

    @property
    def pullback(self) -> EpilogueFunction:
        """The transpose, which returns the slopes' cotangents.

        Its arguments are the tangents' cotangents and the values.
        """
        return self.transposed()[0]

    def transposed(self) -> tuple[EpilogueFunction, list[Any]]:
        """Returns ``pullback`` and its last operands.

        These operands are the arrays that a backward rule (``jax.custom_vjp``) closes over.
        """
        is_known = _are_known(self.tangent.jaxpr.in_avals)
        traced = _transposed if is_known else _transposed.__wrapped__
        return _called(traced, self.tangent, self.slopes, _compat.trace_context())

    @property
    def without_rules(self) -> LinearSpec:
        """The spec without custom derivatives: see ``EpilogueFunction.without_rules``."""
        if self.has_opaque_rule:
            return self
        return dataclasses.replace(self, tangent=self.tangent.without_rules)

    @property
    def has_opaque_rule(self) -> bool:
        """Returns true if the tangent goes through a ``jax.custom_vjp``.

        Such a tangent can only be transposed.
        """
        return any(x.primitive.name == "custom_lin" for x in self.tangent.jaxpr.jaxpr.eqns)

    def of_slopes(self, wanted: Sequence[bool]) -> tuple[LinearSpec, list[int]]:
        """Returns the spec for the wanted slopes, and which of the values it still has.

        Args:
            wanted: whether each of the slopes is wanted.
        """
        avals = self.tangent.jaxpr.in_avals
        of_slopes = avals[: self.slopes]
        picked = [i for i, is_wanted in enumerate(wanted) if is_wanted]

        def some(*operands: Any) -> list[Any]:
            given = dict(zip(picked, operands, strict=False))
            slopes = [
                given[i] if i in given else jnp.zeros(x.shape, x.dtype)
                for i, x in enumerate(of_slopes)
            ]
            return self.tangent(*slopes, *operands[len(picked) :])

        types = [avals[i] for i in picked] + list(avals[self.slopes :])
        spec, kept, held = linear(some, types, len(picked), self.shape)
        assert not held, "no rule is asked for a derivative"
        return spec, kept

    def of_results(self, wanted: Sequence[bool]) -> LinearSpec:
        """Returns the spec with only the wanted tangents."""
        return dataclasses.replace(self, tangent=self.tangent.only(wanted))

    def mapped(self, dims: Sequence[int | None], size: int) -> LinearSpec:
        """Returns the spec with a batch dimension in front of each tangent.

        Args:
            dims: position of the batch dimension in each of the slopes and the values.
            size: size of the batch.
        """
        tangent = self.tangent.mapped(dims, size)
        return LinearSpec(tangent, self.slopes, (size, *self.shape))


def linear(
    function: Any, avals: Sequence[Any], slopes: int, shape: tuple[int, ...]
) -> tuple[LinearSpec, list[int], list[Any]]:
    """Traces a linear function, and drops the values that it does not depend on.

    Args:
        function: function of the slopes and the values.
        avals: types of its arguments.
        slopes: how many of them are slopes.
        shape: shape of the products.

    Returns:
        The function, which of the values it still has, and the arrays that it closes over. The
        arrays follow the values among its arguments.
    """
    traced, held = functions.trace(function, avals, 0)
    traced, used = traced.without_unused(slopes)
    kept = [i - slopes for i in used if slopes <= i < len(avals)]
    held = [held[i - len(avals)] for i in used if i >= len(avals)]
    return LinearSpec(traced, slopes, shape), kept, held


def of_epilogue(
    function: EpilogueFunction, wide: Any, avals: Sequence[Any], moving: Sequence[int]
) -> tuple[LinearSpec, list[int], list[Any]]:
    """Returns the derivative of an epilogue's floating-point results.

    Args:
        function: the epilogue.
        wide: dtype of its accumulators.
        avals: types of the values: the stored accumulators, the operands, the masks.
        moving: indices of the values that have slopes.

    Returns:
        The derivative, which of the values it depends on, and the arrays that rules of the epilogue
        (``jax.custom_jvp``) close over. These arrays are its further values.
    """
    types = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals)
    traced = _of_epilogue if _are_known(types) else _of_epilogue.__wrapped__
    return _called(traced, function, wide, types, tuple(moving), _compat.trace_context())


def of_activation(
    activation: str | Activation | None, z: Any, terms: Sequence[Any]
) -> tuple[LinearSpec, list[int]]:
    """Returns the derivative ``f'(z) (t + bias)`` of an activation that follows a bias.

    Args:
        activation: the activation ``f``.
        z: type of the pre-activation, ``(..., n)``, which is the derivative's value.
        terms: types of ``t`` and, if there is one, of the bias's tangent ``(n,)``: the slopes.

    Returns:
        The derivative, rounded once to the type of ``z``, and which of the values it depends on.
    """
    types = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*terms, z))
    traced = _of_activation if _are_known(types) else _of_activation.__wrapped__
    return traced(activation, types, _compat.trace_context())


def _are_known(avals: Sequence[Any]) -> bool:
    """Checks if no extent is symbolic; different symbols may share a name."""
    return all(isinstance(extent, int) for x in avals for extent in x.shape)


class _HoldsArrays(Exception):  # noqa: N818
    """Carries a result past a cache, because its arrays may be tracers."""

    def __init__(self, *result: Any) -> None:
        self.result = result


def _called(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function whose cache does not keep results that hold arrays."""
    try:
        return function(*arguments)
    except _HoldsArrays as found:
        return found.result


@functools.lru_cache(maxsize=256)
def _of_epilogue(
    function: EpilogueFunction,
    wide: Any,
    avals: tuple[Any, ...],
    moving: tuple[int, ...],
    tracing: Any,
) -> tuple[LinearSpec, list[int], list[Any]]:
    del tracing
    count = function.accumulators
    smooth = [is_smooth(x.dtype) for x in function.results]

    def tangent(*operands: Any) -> list[Any]:
        slopes, values = operands[: len(moving)], operands[len(moving) :]

        def of_moving(*varied: Any) -> list[Any]:
            every = list(values)
            for i, value in zip(moving, varied, strict=True):
                every[i] = value
            results = function.of_masks(*(z.astype(wide) for z in every[:count]), *every[count:])
            return [x for x, is_float in zip(results, smooth, strict=True) if is_float]

        return jax.jvp(of_moving, tuple(values[i] for i in moving), tuple(slopes))[1]

    types = [*(avals[i] for i in moving), *avals]
    spec, kept, held = linear(tangent, types, len(moving), tuple(avals[0].shape))
    if held:
        raise _HoldsArrays(spec, kept, held)
    return spec, kept, []


@functools.lru_cache(maxsize=256)
def _of_activation(
    activation: str | Activation | None, types: tuple[Any, ...], tracing: Any
) -> tuple[LinearSpec, list[int]]:
    del tracing
    z = types[-1]
    dtype = accumulator_dtype(z.dtype, z.dtype, z.dtype)

    def tangent(*operands: Any) -> list[Any]:
        # All get one rank, because JAX can be configured to insist on it.
        wide = [lax.expand_dims(x.astype(dtype), range(len(z.shape) - x.ndim)) for x in operands]
        *terms, at = wide
        total = sum(terms[1:], terms[0])
        return [jax.jvp(resolve(activation).reference, (at,), (total,))[1].astype(z.dtype)]

    spec, kept, held = linear(tangent, types, len(types) - 1, z.shape)
    assert not held, "activations close over no arrays"
    return spec, kept


def of_wanted(found: Sequence[Any], wanted: Sequence[bool]) -> list[Any]:
    """Returns a cotangent for each slope, ``None`` where it is not wanted.

    Args:
        found: cotangents of all slopes, or of the wanted ones.
        wanted: whether each of the slopes is wanted.
    """
    if len(found) < len(wanted):
        remaining = iter(found)
        return [next(remaining) if is_wanted else None for is_wanted in wanted]
    return [x if is_wanted else None for x, is_wanted in zip(found, wanted, strict=True)]


def is_smooth(dtype: Any) -> bool:
    """Checks if results of this type have derivatives."""
    return jnp.issubdtype(dtype, jnp.inexact)


@functools.lru_cache(maxsize=256)
def _transposed(
    tangent: EpilogueFunction, slopes: int, tracing: Any
) -> tuple[EpilogueFunction, list[Any]]:
    del tracing
    avals, results = tangent.types, tangent.results

    def pullback(*operands: Any) -> list[Any]:
        cotangents, values = operands[: len(results)], operands[len(results) :]

        def of_slopes(*varied: Any) -> list[Any]:
            return tangent(*varied, *values)

        return list(jax.linear_transpose(of_slopes, *avals[:slopes])(list(cotangents)))

    traced, held = functions.trace(pullback, [*results, *avals[slopes:]], 0)
    if held:
        raise _HoldsArrays(traced, held)
    return traced, []
