"""Functions of float64 numbers with rounding errors of a smaller type."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from jax_tcgemm._compat import jaxprs

SIGNS = 1000  # signs of a computation; after as many results they repeat

# Operations that round. Others, such as maxima, must keep equal numbers equal.
_ROUNDED = {
    *("add", "add_any", "sub", "mul", "div", "dot_general"),
    *("exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "sin", "cos", "erf"),
    *("integer_pow", "pow", "square", "sqrt", "rsqrt", "reduce_sum", "scatter-add"),
}


def with_errors(function: Any, rounding: float) -> Callable[..., Any]:
    """Returns the function with each intermediate result changed by a part of itself.

    This is Monte Carlo arithmetic (Parker, 1997), with one sign for all elements of a result.

    Args:
        function: the function, of arrays of float64.
        rounding: the part by which results are changed, up or down.

    Returns:
        A function of the signs, ``(SIGNS,)`` numbers 1 or -1, and of the arguments.
    """

    def run(signs: Any, *args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        factors = (1 + rounding * signs[i % SIGNS] for i in itertools.count())
        results = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args), factors)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run


def _evaluate(jaxpr: Any, consts: Any, arguments: Sequence[Any], factors: Any) -> list[Any]:
    """Evaluates a jaxpr, and multiplies each result that is rounded by the next factor."""
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))

    def read(x):
        return x.val if isinstance(x, Literal) else env[x]

    for eqn in jaxpr.eqns:
        values = [read(x) for x in eqn.invars]
        if eqn.primitive.name in jaxprs.CALLS:
            called = next(x for x in eqn.params.values() if jaxprs.jaxpr_of(x) is not None)
            inner = jaxprs.jaxpr_of(called)
            results = _evaluate(inner, getattr(called, "consts", ()), values, factors)
        else:
            results = jaxprs.bind_again(eqn, values)
            if eqn.primitive.name in _ROUNDED:
                results = [x * next(factors) if x.dtype == np.float64 else x for x in results]
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(x) for x in jaxpr.outvars]
