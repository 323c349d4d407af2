"""A JAX function as an epilogue: traced once, with closed-over arrays as operands."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend import core

from jax_tcgemm import _compat
from jax_tcgemm._compat import jaxprs
from jax_tcgemm.epilogue import rng
from jax_tcgemm.epilogue.evaluation import evaluate, held_arrays, of_no_axes
from jax_tcgemm.epilogue.identity import Key, key_of


@dataclasses.dataclass(frozen=True, eq=False)
class EpilogueFunction:
    """An epilogue: a function of the accumulators, which ``jit`` can use as a key.

    Attributes:
        jaxpr: the function. Its arguments are the accumulators, then the operands. It has constants
            only if a rule for derivatives or batches closes over arrays.
        accumulators: how many of the arguments are accumulators.
    """

    jaxpr: core.ClosedJaxpr
    accumulators: int

    @functools.cached_property
    def key(self) -> Key:
        """The key by which caches find this function."""
        return key_of(self.jaxpr)

    def __eq__(self, other: object) -> bool:
        """Returns true if both compute and differentiate the same."""
        if self is other:
            return True
        if not isinstance(other, EpilogueFunction) or self.accumulators != other.accumulators:
            return False
        return self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __call__(self, *values: Any) -> list[Any]:
        """Computes the results with JAX operations, which can be differentiated."""
        if _compat.has_manual_axes():  # the operands may vary over mesh axes, the numbers do not
            kept = jaxprs.CUSTOM_CALLS
            return evaluate(self.jaxpr.jaxpr, self.jaxpr.consts, values, kept=kept)
        return core.jaxpr_as_fun(self.jaxpr)(*values)

    def computed(self, *values: Any) -> list[Any]:
        """Computes the results where nothing is differentiated any more.

        This also works within ``shard_map``, where the operands vary over mesh axes and the traced
        arguments did not.
        """
        return evaluate(self.flat.jaxpr, self.flat.consts, values)

    def of_shardings(self, *values: Any, beside: Any = None) -> list[Any]:
        """Computes results whose types have the shardings that they have without this package.

        Args:
            *values: the arguments.
            beside: the product, whose sharding masks have.
        """
        results = evaluate(self.jaxpr.jaxpr, self.jaxpr.consts, values, places=True)
        if beside is None:
            return results

        def is_free_mask(x: Any) -> bool:
            return _is_mask(x, beside.shape) and not _compat.is_sharded(x)

        return [_compat.typed_as(beside, x) if is_free_mask(x) else x for x in results]

    @property
    def types(self) -> list[jax.ShapeDtypeStruct]:
        """Types of the accumulators and the operands."""
        return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.jaxpr.in_avals]

    @property
    def results(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Types of the results."""
        return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.jaxpr.out_avals)

    @property
    def reduces(self) -> bool:
        """Returns true if a result has another shape than the product."""
        return any(x.shape != self.types[0].shape for x in self.results)

    @functools.cached_property
    def flat(self) -> core.ClosedJaxpr:
        """The function without calls of ``jit``, custom derivatives and ``jax.checkpoint``."""
        return self._inlined()

    @functools.cached_property
    def without_rules(self) -> EpilogueFunction:
        """The same function without custom derivatives, for programs that differentiate nothing.

        JAX creates new objects for custom derivatives in each trace, so that two traces of one
        function are not equal. Without them they are.
        """
        has_calls = any(eqn.primitive.name in jaxprs.CALLS for eqn in self.jaxpr.jaxpr.eqns)
        return EpilogueFunction(self.flat, self.accumulators) if has_calls else self

    def mapped(self, dims: Sequence[int | None], size: int) -> EpilogueFunction:
        """Returns the function with a batch dimension in front of each result.

        Args:
            dims: position of the batch dimension in each argument.
            size: size of the batch.
        """
        batched = jax.vmap(self, in_axes=tuple(dims), out_axes=0, axis_size=size)
        avals = []
        for aval, dim in zip(self.jaxpr.in_avals, dims, strict=True):
            shape = aval.shape if dim is None else (*aval.shape[:dim], size, *aval.shape[dim:])
            avals.append(jax.ShapeDtypeStruct(shape, aval.dtype))
        return _derived(batched, avals, self.accumulators)

    @functools.cached_property
    def differentiable(self) -> core.ClosedJaxpr:
        """The function without calls, except calls with their own derivative."""
        return self._inlined(jaxprs.CUSTOM_CALLS)

    def _inlined(self, kept: frozenset[str] = frozenset()) -> core.ClosedJaxpr:
        def inlined(*values: Any) -> list[Any]:
            return evaluate(self.jaxpr.jaxpr, self.jaxpr.consts, values, kept=kept)

        with _compat.no_mesh():
            return jax.make_jaxpr(inlined)(*self.types)

    @functools.cached_property
    def masks(self) -> tuple[Any, ...]:
        """Variables of ``differentiable`` that are random booleans, one for each element.

        A mask takes one byte an element. Reading it again takes less time than drawing it again.
        """
        jaxpr = self.differentiable.jaxpr
        shape = jaxpr.invars[0].aval.shape
        dependent, drawn = set(jaxpr.invars[: self.accumulators]), set()
        masks: dict[Any, None] = {}
        for eqn in jaxpr.eqns:
            taken = [x for x in eqn.invars if not isinstance(x, core.Literal)]
            if any(x in dependent for x in taken):
                dependent.update(eqn.outvars)
                masks.update(dict.fromkeys(x for x in taken if x in drawn and _is_mask(x, shape)))
            elif eqn.primitive.name in rng.DRAWS or any(x in drawn for x in taken):
                drawn.update(eqn.outvars)
        return tuple(masks)

    def with_residuals(self, dtype: Any) -> EpilogueFunction:
        """Returns the function with further results, which derivatives need.

        These results are the accumulators, converted to ``dtype``, and the masks.
        """
        jaxpr, masks = self.differentiable, self.masks

        def both(*values: Any) -> list[Any]:
            env: dict[Any, Any] = {}
            results = evaluate(jaxpr.jaxpr, jaxpr.consts, values, kept=jaxprs.CUSTOM_CALLS, env=env)
            accumulators = (x.astype(dtype) for x in values[: self.accumulators])
            return [*results, *accumulators, *(env[mask] for mask in masks)]

        return _derived(both, self.types, self.accumulators)

    def of_masks(self, *values: Any) -> list[Any]:
        """Computes the results from known masks.

        Args:
            *values: the accumulators, the operands, the masks.
        """
        jaxpr, count = self.differentiable, len(self.jaxpr.in_avals)
        env = dict(zip(self.masks, values[count:], strict=True))
        return evaluate(
            jaxpr.jaxpr, jaxpr.consts, values[:count], kept=jaxprs.CUSTOM_CALLS, env=env
        )

    def only(self, wanted: Sequence[bool]) -> EpilogueFunction:
        """Returns the function with only the wanted results."""

        def picked(*values: Any) -> list[Any]:
            return [x for x, is_wanted in zip(self(*values), wanted, strict=True) if is_wanted]

        return _derived(picked, self.types, self.accumulators)

    def without_unused(self, needed: int) -> tuple[EpilogueFunction, list[int]]:
        """Returns the function without unused operations, and which operands remain.

        Args:
            needed: how many of the first operands always stay.
        """
        whole = self.differentiable
        jaxpr, is_used = jaxprs.without_unused(whole.jaxpr, needed)
        closed = core.ClosedJaxpr(jaxpr, whole.consts)
        function = EpilogueFunction(closed, self.accumulators)
        return function, [i for i, each in enumerate(is_used) if each]


def trace(
    function: Callable[..., Any], avals: Sequence[Any], accumulators: int
) -> tuple[EpilogueFunction, list[Any]]:
    """Traces a function of accumulators and operands, which returns a list.

    Args:
        function: the function.
        avals: types of its arguments.
        accumulators: how many of them are accumulators.

    Returns:
        The epilogue, and ``rng.words`` of the arrays that the function closes over. The operands
        of the epilogue are ``rng.words`` of the arguments, then those of the arrays.
    """
    closed = _traced(function, avals)
    # Arrays of nested calls become operands only if the calls are inlined.
    kept = jaxprs.CUSTOM_CALLS
    arrays = held_arrays(closed.jaxpr, closed.consts, kept)
    if len(arrays) == len(closed.consts):
        kept = jaxprs.CALLS
    types = [*avals, *map(jax.typeof, arrays)]
    is_key = [rng.is_key(each.dtype) for each in types]

    def of_words(*values: Any) -> list[Any]:
        every = [rng.wrapped(x) if wrap else x for x, wrap in zip(values, is_key, strict=True)]
        given = dict(zip(map(id, arrays), every[len(avals) :], strict=True))
        own = every[: len(avals)]
        return evaluate(closed.jaxpr, closed.consts, own, kept, given=given)

    if arrays or any(is_key):
        with _compat.no_mesh():
            closed = jax.make_jaxpr(of_words)(*map(rng.word_type, types))
    # A derivative with respect to a Python number traces the number itself, which is no array.
    return EpilogueFunction(closed, accumulators), [jnp.asarray(x) for x in rng.words(arrays)]


def _derived(
    function: Callable[..., Any], avals: Sequence[Any], accumulators: int
) -> EpilogueFunction:
    """Traces a function that calls an epilogue on its own operands.

    Raises:
        TypeError: a batching rule of the epilogue closes over a traced value.
    """
    closed = _traced(function, avals)
    traced = [x for x in closed.consts if isinstance(x, Tracer)]
    if traced:
        raise TypeError(
            f"a rule of the epilogue closes over traced values {traced}; accepted: the same among "
            "the operands of the function that has the rule"
        )
    return EpilogueFunction(closed, accumulators)


def _traced(function: Callable[..., Any], avals: Sequence[Any]) -> core.ClosedJaxpr:
    """Traces a function so that the result holds for any mesh.

    Raises:
        TypeError: the function has effects, which its primitive cannot have.
    """
    may_name_axes = _compat.is_unchecked_manual()
    try:
        with _compat.no_mesh():
            return _without_effects(jax.make_jaxpr(function)(*avals), may_name_axes)
    except Exception:
        # Within ``shard_map`` the function may close over varying values, whose types need a mesh.
        if not _compat.has_manual_axes():
            raise
    closed = _without_effects(jax.make_jaxpr(function)(*avals), may_name_axes)
    with _compat.no_mesh():
        return of_no_axes(closed)


def _without_effects(closed: core.ClosedJaxpr, may_name_axes: bool) -> core.ClosedJaxpr:
    """Returns its argument, or raises ``TypeError`` if that has effects."""
    effects, axes = jaxprs.effects_and_axes(closed)
    if effects or (axes and not may_name_axes):
        what = f"side effects {effects}" if effects else f"named axes {axes}"
        raise TypeError(
            f"epilogue= has {what}; accepted: functions without side effects, and without named "
            "axes except under shard_map with check_vma=False. Apply this function to the product "
            "instead: f(gemm(a, b, preferred_element_type=jnp.float32))"
        )
    return closed


def _is_mask(var: Any, shape: tuple[int, ...]) -> bool:
    return var.aval.shape == shape and var.aval.dtype == bool
