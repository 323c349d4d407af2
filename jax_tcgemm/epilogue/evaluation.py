"""Evaluates a jaxpr with its calls inlined and each operation in its own context."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jax_tcgemm._compat import HOST_ARRAYS, is_sharded, jaxprs, no_mesh, typed_as

_LOOPS = frozenset({"scan", "while", "cond"})

# Names of the parameters in which calls hold the jaxpr that they run.
_CALLS = ("call_jaxpr", "fun_jaxpr", "jaxpr")


def evaluate(
    jaxpr: Any,
    consts: Sequence[Any],
    values: Sequence[Any],
    kept: frozenset[str] = frozenset(),
    env: dict[Any, Any] | None = None,
    forget_axes: bool = False,
    given: Mapping[int, Any] | None = None,
    places: bool = False,
) -> list[Any]:
    """Evaluates a jaxpr and inlines its calls.

    Args:
        jaxpr: the operations.
        consts: its constants.
        values: its arguments.
        kept: names of calls that are not inlined.
        env: values of known variables; the evaluation adds those of all others.
        forget_axes: whether the jaxpr varies over mesh axes, which do not exist here.
        given: replacements for arrays of ``held_arrays``, by the array's ``id``.
        places: whether operands get the sharding of a sharded one beside them, on explicit axes.
    """
    env, given = {} if env is None else env, given or {}
    env.update(zip(jaxpr.constvars, (given.get(id(x), x) for x in consts), strict=True))
    env.update(zip(jaxpr.invars, values, strict=True))

    def read(atom: Any) -> Any:
        if isinstance(atom, core.Literal):
            return given.get(id(atom.val), atom.val)
        return env[atom]

    for eqn in jaxpr.eqns:
        if any(var not in env for var in eqn.outvars):
            values = [*map(read, eqn.invars)]
            results = apply(eqn, values, kept, forget_axes, given, places)
            env.update(zip(eqn.outvars, results, strict=True))
    return [*map(read, jaxpr.outvars)]


def apply(
    eqn: Any,
    values: Sequence[Any],
    kept: frozenset[str] = frozenset(),
    forget_axes: bool = False,
    given: Mapping[int, Any] | None = None,
    places: bool = False,
) -> list[Any]:
    """Evaluates one operation; inlines it if it is a call."""
    if forget_axes and eqn.primitive.name in jaxprs.VARYING:
        return list(values)
    called = _called(eqn, kept)
    if called is not None:
        jaxpr, consts = called
        return evaluate(
            jaxpr, consts, values, kept, forget_axes=forget_axes, given=given, places=places
        )
    if forget_axes:
        params = {key: _parameter_of_no_axes(value) for key, value in eqn.params.items()}
        eqn = eqn.replace(params=params)
    with jaxprs.in_context(eqn):
        if not places:
            return bind_again(eqn, values)
        if eqn.primitive.name in _LOOPS:  # their jaxprs were traced without a mesh
            return _like_sharded(bind_again(eqn, values), values)
        shape = eqn.outvars[0].aval.shape
        is_elementwise = all(x.aval.shape == shape for x in eqn.outvars)
        if is_elementwise and eqn.primitive.name != "dot_general":
            peers = [x for x in values if jnp.shape(x) == shape]
            values = _like_sharded(values, peers)
        return bind_again(eqn, values)


def _like_sharded(values: Sequence[Any], peers: Sequence[Any]) -> list[Any]:
    """Gives unsharded values the sharding of a sharded one of their shape.

    JAX does so when a function is traced on a mesh with explicit axes. This one was traced without.
    """
    sharded = {x.shape: x for x in reversed(peers) if is_sharded(x)}
    return [
        typed_as(sharded[jnp.shape(x)], x) if jnp.shape(x) in sharded and not is_sharded(x) else x
        for x in values
    ]


def bind_again(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Applies an operation to values that may vary over fewer mesh axes than before."""
    if jaxprs.varies(x.aval for x in eqn.invars) and not jaxprs.varies(map(jax.typeof, values)):
        eqn = jaxprs.with_rule(eqn, _rule_of_no_axes)
    return jaxprs.bind_again(eqn, values)


def _rule_of_no_axes(closed: Any) -> Any:
    with no_mesh():
        return of_no_axes(closed)


def _called(eqn: Any, kept: frozenset[str]) -> tuple[Any, Sequence[Any]] | None:
    """Returns the jaxpr and constants of a call; ``None`` if it is no call or kept."""
    if eqn.primitive.name not in jaxprs.CALLS - kept:
        return None
    called = next((eqn.params[key] for key in _CALLS if key in eqn.params), None)
    return None if called is None else (jaxprs.jaxpr_of(called), getattr(called, "consts", ()))


def held_arrays(jaxpr: Any, consts: Sequence[Any], kept: frozenset[str]) -> list[Any]:
    """Returns the arrays that a jaxpr and its calls close over, each array once.

    Under ``jax_use_simplified_jaxpr_constants`` these arrays are literals.

    Args:
        jaxpr: the operations.
        consts: its constants.
        kept: names of calls whose jaxprs are not searched.
    """
    return [*{id(x): x for x in _held(jaxpr, consts, kept)}.values()]


def _held(jaxpr: Any, consts: Sequence[Any], kept: frozenset[str]) -> Iterator[Any]:
    yield from consts
    atoms = (atom for eqn in jaxpr.eqns for atom in eqn.invars)
    for atom in (*atoms, *jaxpr.outvars):
        if isinstance(atom, core.Literal) and _is_array(atom.val):
            yield atom.val
    for eqn in jaxpr.eqns:
        called = _called(eqn, kept)
        if called is not None:
            yield from _held(*called, kept)


def _is_array(x: Any) -> bool:
    """Checks if a literal is a closed-over array, not a number in the function's code."""
    return isinstance(x, jax.Array) or (isinstance(x, HOST_ARRAYS) and x.ndim > 0)


def of_no_axes(closed: Any) -> Any:
    """Traces a jaxpr again, so that its values vary over no mesh axes.

    Args:
        closed: the jaxpr. It may have no place for constants.
    """
    has_place = hasattr(closed, "consts")
    # Inlined calls would need a place for the arrays that they close over.
    kept = jaxprs.CUSTOM_CALLS if has_place else jaxprs.CALLS
    jaxpr, consts = jaxprs.jaxpr_of(closed), getattr(closed, "consts", ())
    arrays = held_arrays(jaxpr, consts, kept)
    count = len(arrays)

    def again(*values: Any) -> list[Any]:
        given = dict(zip(map(id, arrays), values[:count], strict=True))
        return evaluate(jaxpr, consts, values[count:], kept, forget_axes=True, given=given)

    avals = [*map(jax.typeof, arrays), *(x.aval for x in jaxpr.invars)]
    anew = jax.make_jaxpr(again)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals)).jaxpr
    if not has_place:
        return anew
    anew = anew.replace(constvars=anew.invars[:count], invars=anew.invars[count:])
    return core.ClosedJaxpr(anew, arrays)


def _parameter_of_no_axes(value: Any) -> Any:
    """Applies ``of_no_axes`` to a parameter's jaxprs; returns other values unchanged."""
    if type(value) is tuple:  # jaxprs of branches
        return tuple(map(_parameter_of_no_axes, value))
    return value if jaxprs.jaxpr_of(value) is None else of_no_axes(value)
