"""Private names of JAX for jaxprs, and what their types are in each version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax._src import core as _core
from jax.interpreters import partial_eval as _partial_eval

from jax_tcgemm._compat import match_varying

# What makes values vary over more mesh axes, within ``shard_map``.
VARYING = frozenset({"pvary", "pcast"})


def jaxpr_of(value: Any) -> Any:
    """Returns the jaxpr that a parameter of an operation is, ``None`` where it is none.

    Closed ones are a type of their own before JAX 0.12.
    """
    inner = getattr(value, "jaxpr", value)
    return inner if hasattr(inner, "eqns") else None


def without_unused(jaxpr: Any, needed: int) -> tuple[Any, list[bool]]:
    """Returns a jaxpr without what its results do not need, and which arguments it still has.

    Args:
        jaxpr: the operations.
        needed: how many of the first arguments stay.
    """
    stay = [i < needed for i in range(len(jaxpr.invars))]
    return _partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=stay)


def eval_jaxpr(jaxpr: Any, consts: Sequence[Any], *values: Any) -> list[Any]:
    """Evaluates a jaxpr."""
    return list(_core.eval_jaxpr(jaxpr, consts, *values))


def bind_again(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Applies the operation of an equation to other values, which may vary over mesh axes."""
    values = match_varying(values) if len(values) > 1 else values
    params = eqn.primitive.get_bind_params(eqn.params)
    functions, params = params if isinstance(params, tuple) else ((), params)  # before 0.12
    results = eqn.primitive.bind(*functions, *values, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def is_rule(value: Any) -> bool:
    """Whether a parameter of an operation is a function, wrapped or not."""
    return hasattr(value, "transforms") or (callable(value) and not isinstance(value, type))
