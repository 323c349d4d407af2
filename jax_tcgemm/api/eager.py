"""Calls outside ``jit``: each public function is one program per set of operand types."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from jax_tcgemm import _compat
from jax_tcgemm.api.arguments import is_number
from jax_tcgemm.problem.exact import exactly, number_of
from jax_tcgemm.quantized.packed import is_weight

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Constant(NamedTuple):
    """A number as a static argument, which ``jit`` compares by ``==``."""

    key: Any


def one_program(
    *static: str, numbers: tuple[str, ...] = (), functions: tuple[str, ...] = ()
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Makes a function of arrays one program, traced and compiled once for their types.

    Inside another program, the operations of the function appear as if written out.

    A call that is given a function traces it each time, because a method or closure may change
    between two calls. JAX compiles the primitives once for equal traces. Exception: outside of
    other programs, a function that ``jax.jit`` returned is a static argument from its second call
    on, because ``jax.jit`` traces it once as well.

    Args:
        *static: names of the keyword arguments that are not arrays.
        numbers: names of keyword arguments that are static if they are Python numbers.
        functions: names of keyword arguments that are ``None`` or a function.

    Returns:
        A decorator. Errors of the decorated function refer to the arguments as the caller gave
        them.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def of_constants(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for name in numbers:
                if type(kwargs.get(name)) is _Constant:
                    kwargs[name] = number_of(kwargs[name].key)  # pyright: ignore
            return function(*args, **kwargs)

        @functools.cache
        def program(*constants: str) -> Callable[..., Any]:
            names = (*static, *constants)
            return jax.jit(of_constants, static_argnames=names, inline=_compat.INLINE)

        default = program(*numbers)

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            args, kwargs = _with_weights(args, kwargs)
            passed = [name for name in functions if kwargs.get(name) is not None]
            if passed and not all(_comes_again(kwargs[name]) for name in passed):
                return function(*args, **kwargs)
            run = default
            if passed or any(name in kwargs and not is_number(kwargs[name]) for name in numbers):
                run = program(*(n for n in numbers if is_number(kwargs.get(n, 1))), *passed)
            given = {key: _array(value) for key, value in kwargs.items()}
            for name in numbers:
                if is_number(given.get(name)):
                    given[name] = _Constant(exactly(given[name]))
            try:
                return run(*map(_array, args), **given)
            except (TypeError, ValueError):
                pass  # no program takes an argument, or the function raised this
            return function(*args, **kwargs)

        return call

    return decorate


# Functions that ``jax.jit`` returned and that an earlier call was given.
_JITTED = weakref.WeakSet[Any]()


def _comes_again(function: Any) -> bool:
    """Checks if ``jax.jit`` returned this function and an earlier call was given it.

    Inside a program the result is always False. The first call traces the function, so that
    functions that differ only in their tables share a program.
    """
    if not _compat.is_jitted(function) or _compat.is_tracing():
        return False
    if function in _JITTED:
        return True
    _JITTED.add(function)
    return False


def _with_weights(args: Any, kwargs: Any) -> Any:
    """Returns the arguments with the quantized weights that variables, as of Flax, hold."""
    return tuple(map(held_weight, args)), {key: held_weight(x) for key, x in kwargs.items()}


def held_weight(x: Any) -> Any:
    """Returns the quantized weight that a variable holds; anything else unchanged."""
    if isinstance(x, jax.Array) or not hasattr(type(x), "__jax_array__"):
        return x
    held = x.__jax_array__()
    return held if is_weight(held) else x


def _array(x: Any) -> Any:
    """Returns the array of an object with ``__jax_array__``; anything else unchanged."""
    return jnp.asarray(x) if hasattr(type(x), "__jax_array__") else x
