"""Private JAX names for jaxprs, and differences of their types between versions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core as _core
from jax._src import effects as _effects
from jax._src import linear_util as _linear_util
from jax._src import mesh as _mesh
from jax._src import sharding_impls as _sharding_impls
from jax._src import source_info_util as _source_info_util
from jax._src import util as _util
from jax._src.interpreters import partial_eval as _pe
from jax._src.lax import lax as _lax
from jax.extend import core as _extended
from jax.interpreters import partial_eval as _partial_eval

from jax_tcgemm._compat import match_varying, option

# Operations that only run the operations inside them; some have a custom derivative.
_PLAIN_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call"})
CUSTOM_CALLS = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"})
OTHER_CALLS = _PLAIN_CALLS | {"remat", "remat2", "checkpoint"}
CALLS = CUSTOM_CALLS | OTHER_CALLS

# Parameters with the sharding of a result.
_SHARDINGS = frozenset({"sharding", "out_sharding"})

# The abstract value of every array, PRNG keys included.
ShapedArray = _core.ShapedArray

# Operations that leave the bytes of an array in its declared layout unchanged.
VIEWS = frozenset({"reshape", "squeeze", "expand_dims"})

# Operations inside ``shard_map`` that make values vary over more mesh axes.
VARYING = frozenset({"pvary", "pcast"})


def jaxpr_of(value: Any) -> Any:
    """Returns the jaxpr in a parameter of an operation; ``None`` if the parameter is no jaxpr.

    Before JAX 0.12, closed jaxprs have a separate type.
    """
    inner = getattr(value, "jaxpr", value)
    return inner if hasattr(inner, "eqns") else None


def without_unused(jaxpr: Any, needed: int) -> tuple[Any, list[bool]]:
    """Returns a jaxpr without unused operations, and for each argument whether it stays.

    Args:
        jaxpr: the operations.
        needed: this many of the first arguments stay in any case.
    """
    stay = [i < needed for i in range(len(jaxpr.invars))]
    return _partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=stay)


def source_of(eqn: Any) -> str:
    """Returns the file, line and function that contain an operation."""
    return _source_info_util.summarize(eqn.source_info)


def bind_again(eqn: Any, values: Sequence[Any], *, match: bool = True) -> list[Any]:
    """Applies the operation of an equation to other values.

    Args:
        eqn: the equation.
        values: the new operands.
        match: whether the new operands may vary over more mesh axes than the original ones.
    """
    values = match_varying(values) if match and len(values) > 1 else values
    # Transposes record that there was no mesh, which JAX refuses for values that vary over one.
    given = {
        key: None if key in _SHARDINGS and _has_empty_mesh(value) else value
        for key, value in eqn.params.items()
    }
    params = eqn.primitive.get_bind_params(given)
    functions, params = params if isinstance(params, tuple) else ((), params)  # before 0.12
    results = eqn.primitive.bind(*functions, *values, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def _has_empty_mesh(sharding: Any) -> bool:
    return getattr(getattr(sharding, "mesh", None), "empty", False)


def with_rule(eqn: Any, change: Callable[[Any], Any]) -> Any:
    """Returns a ``custom_jvp_call`` whose rule, once it is traced, has another jaxpr.

    Args:
        eqn: an equation; others are returned unchanged.
        change: returns the jaxpr in place of a closed one.
    """
    rule = eqn.params.get("jvp_jaxpr_fun")
    if rule is None:
        return eqn

    def changed(*zeros: bool) -> tuple[Any, ...]:
        with _mesh.use_abstract_mesh(eqn.ctx.cur_abstract_mesh):  # the rule may be traced now
            jaxpr, consts, *others = rule.call_wrapped(*zeros)
        closed = change(_extended.ClosedJaxpr(jaxpr, consts))
        return closed.jaxpr, closed.consts, *others

    wrapped = _linear_util.wrap_init(changed, debug_info=rule.debug_info)
    return eqn.replace(params={**eqn.params, "jvp_jaxpr_fun": wrapped})


def varies(avals: Iterable[Any]) -> bool:
    """Returns true if one of some types varies over axes of ``shard_map``."""
    manual = [getattr(aval, "manual_axis_type", aval) for aval in avals]  # since 0.12
    return any(getattr(x, "varying", None) or getattr(x, "vma", None) for x in manual)


def is_rule(value: Any) -> bool:
    """Returns true if a parameter of an operation is a function, wrapped or not."""
    return hasattr(value, "transforms") or (callable(value) and not isinstance(value, type))


def plain_call(eqn: Any) -> tuple[Any, Sequence[Any]] | None:
    """Returns the jaxpr of a plain ``jit`` call and its constants; ``None`` for other equations.

    A call is not plain if it specifies shardings or layouts, donates arguments, has compiler
    options or changes mutable arrays.
    """
    if eqn.primitive.name not in _PLAIN_CALLS:
        return None
    params = eqn.params
    unspecified = _sharding_impls.UnspecifiedValue  # pyright: ignore[reportPrivateImportUsage]
    where = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    layouts = (*params.get("in_layouts", ()), *params.get("out_layouts", ()))
    if (
        any(not isinstance(x, unspecified) for x in where)
        or any(x is not None for x in layouts)
        or any(params.get("donated_invars", ()))
        or params.get("compiler_options_kvs", ())
        or has_input_effects(eqn)
    ):
        return None
    called = next(params[key] for key in ("jaxpr", "call_jaxpr") if key in params)
    return jaxpr_of(called), getattr(called, "consts", ())


def context_of(eqn: Any) -> tuple[Any, ...]:
    """Returns where and how an equation is computed, as set by JAX's context managers.

    The first element is the compute type, ``None`` for the device. The second is whether threefry
    is partitionable. The third is XLA's metadata as names, types and values; the types distinguish
    ``True`` from 1.
    """
    context = eqn.ctx
    told = getattr(context, "xla_metadata", None) or {}
    items = tuple(
        (name, type(value), value.hex() if isinstance(value, float) else value)
        for name, value in sorted(told.items())
    )
    return context.compute_type, context.threefry_partitionable, items


def context_fields(context: Any) -> tuple[tuple[str, Any], ...]:
    """Returns the names and values of all fields of an equation's context."""
    names = (name for name in type(context).__slots__ if name not in ("configs", "__weakref__"))
    return tuple((name, getattr(context, name)) for name in names)


@contextlib.contextmanager
def on_mesh_of(avals: Iterable[Any]) -> Iterator[None]:
    """Traces on the mesh of types, if they have one, like the types inside ``auto_axes``.

    Args:
        avals: the types of an operation's operands and results, all of the same mesh.
    """
    meshes = [aval.sharding.mesh for aval in avals if isinstance(aval, ShapedArray)]
    mesh = next((each for each in meshes if not each.empty), None)
    if mesh is None or mesh == _mesh.get_abstract_mesh():
        yield
        return
    with _mesh.use_abstract_mesh(mesh):
        yield


@contextlib.contextmanager
def in_context(eqn: Any) -> Iterator[None]:
    """Traces in the context of an equation, but on the caller's mesh.

    An equation that was traced without a mesh may be evaluated inside ``shard_map``.
    """
    compute_type, partitionable, told = context_of(eqn)
    if compute_type is None and not told and partitionable == option("jax_threefry_partitionable"):
        yield  # entering a context takes time, and most equations do not need it
        return
    mesh = _mesh.get_abstract_mesh()
    with eqn.ctx.manager, _mesh.use_abstract_mesh(mesh):
        yield


def is_symbolic(extent: Any) -> bool:
    """Returns true if an extent is a symbolic expression of ``jax.export``."""
    return _core.is_symbolic_dim(extent)


def scope_of_call(eqn: Any, scope: Any) -> Any:
    """Returns the name stack inside a call.

    Args:
        eqn: the call.
        scope: the name stack of the jaxpr that contains the call; ``None`` for an empty one.
    """
    scope = with_scope(eqn.source_info, scope).name_stack
    name = eqn.params.get("name")
    return scope if name is None else scope.extend(_util.wrap_name("jit", name))


def with_scope(source_info: Any, scope: Any) -> Any:
    """Returns the source info of an equation with an outer name stack prepended.

    Args:
        source_info: the source info of the equation.
        scope: the outer name stack; ``None`` for an empty one.
    """
    if scope is None:
        return source_info
    return source_info.replace(name_stack=scope + source_info.name_stack)


def effects_and_axes(closed: Any) -> tuple[list[str], list[str]]:
    """Returns the names of effects of a jaxpr that reach its caller, and of the axes it uses."""
    axes = {str(x.name) for x in closed.effects if isinstance(x, _core.NamedAxisEffect)}
    others = (_core.NamedAxisEffect, _core.InternalMutableArrayEffect)
    effects = {type(x).__name__ for x in closed.effects if not isinstance(x, others)}
    return sorted(effects), sorted(axes)


def has_input_effects(eqn_or_jaxpr: Any) -> bool:
    """Returns true if effects refer to an input, as those of mutable arrays do.

    They name the variable or its number.
    """
    return any(isinstance(x, _effects.JaxprInputEffect) for x in eqn_or_jaxpr.effects)


def new_var(aval: Any) -> Any:
    """Returns a new variable, which no jaxpr has."""
    return _core.Var(aval)


def is_staging() -> bool:
    """Returns true if JAX currently records operations in a jaxpr instead of computing them."""
    trace = _core.trace_ctx.trace
    while trace is not None:
        if isinstance(trace, _pe.DynamicJaxprTrace):
            return True
        trace = getattr(trace, "parent_trace", None)
    return False


def scan_parts(eqn: Any) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Returns which results of the body of a ``scan`` it stacks, and which arguments it slices.

    The parameters that say so differ between versions.
    """
    body = jaxpr_of(eqn.params["jaxpr"])

    def is_part(inner: Sequence[Any], outer: Sequence[Any]) -> tuple[bool, ...]:
        pairs = zip(map(_rank, inner), map(_rank, outer), strict=True)
        return tuple(one < every for one, every in pairs)

    return is_part(body.outvars, eqn.outvars), is_part(body.invars, eqn.invars)


def _rank(var: Any) -> int:
    """Returns the rank of a variable; 0 if it is no array, such as a token."""
    return len(getattr(var.aval, "shape", ()))


def eval_jaxpr(jaxpr: Any, consts: Sequence[Any], *values: Any) -> list[Any]:
    """Evaluates a jaxpr, each equation in its context and with its name."""
    return list(_core.eval_jaxpr(jaxpr, consts, *values))


def call(jaxpr: Any, consts: Sequence[Any], values: Sequence[Any], name: str) -> list[Any]:
    """Evaluates a jaxpr; if JAX records operations, adds a single ``jit`` equation.

    Args:
        jaxpr: the operations.
        consts: its constants.
        values: its arguments.
        name: the name of the ``jit`` equation.
    """
    if not is_staging():
        results = eval_jaxpr(jaxpr, consts, *values)
        return [_array(x, var.aval) for x, var in zip(results, jaxpr.outvars, strict=True)]
    jaxpr = _pe.convert_constvars_jaxpr(jaxpr)
    arguments, results = len(jaxpr.invars), len(jaxpr.outvars)
    with jax.disable_jit(False):
        (eqn,) = jax.make_jaxpr(jax.jit(lambda x: x))(0).eqns  # has this JAX's parameters
    params = {
        key: each * (arguments if key.startswith(("in_", "donated_")) else results)
        if key.startswith(("in_", "out_", "donated_"))
        else each
        for key, each in eqn.params.items()
    }
    old = params["jaxpr"]
    params |= {"name": name, "jaxpr": with_jaxpr(old, _extended.ClosedJaxpr(jaxpr, ()))}
    return list(eqn.primitive.bind(*consts, *values, **params))


def _array(x: Any, aval: Any) -> Any:
    """Returns a result as an array; literals and constants of a jaxpr are numbers or of NumPy."""
    if isinstance(x, (jax.Array, _core.Tracer)) or aval.dtype == jax.dtypes.float0:
        return x
    weak = getattr(aval, "weak_type", False)
    return _lax._convert_element_type(np.array(x), aval.dtype, weak_type=weak)


def by_shards(eqn: Any, function: Any, values: Sequence[Any]) -> list[Any]:
    """Applies a ``shard_map`` equation with another function inside."""
    params = eqn.params
    names = params["newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"]
    mapped = jax.shard_map(
        lambda *xs: tuple(function(*xs)),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=frozenset(names),
        check_vma=params["check_vma"],
    )
    return list(mapped(*values))


def with_jaxpr(old: Any, new: Any) -> Any:
    """Returns ``new`` in the form of ``old``; ``None`` if that form cannot hold its constants.

    Args:
        old: a parameter of an operation.
        new: a result of ``jax.make_jaxpr``.
    """
    if hasattr(old, "jaxpr") or not hasattr(new, "jaxpr"):
        return new
    return None if new.consts else new.jaxpr


def closed(jaxpr: Any, consts: Sequence[Any]) -> Any:
    """Returns a closed jaxpr: the operations with their constants."""
    return _extended.ClosedJaxpr(jaxpr, consts)
