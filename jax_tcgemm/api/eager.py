"""Calls outside of ``jit``: a public function is one program for all operands of the same types."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from jax_tcgemm import _compat
from jax_tcgemm.api.arguments import is_number

_P = ParamSpec("_P")
_R = TypeVar("_R")


def one_program(
    *static: str, numbers: tuple[str, ...] = ()
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Makes a function of arrays a program that is traced and compiled once for their types.

    Within another program nothing is left of it: its operations stand there as if written out.

    Args:
        *static: names of the keyword arguments that are not arrays.
        numbers: names of keyword arguments that are static where they are Python numbers.

    Returns:
        A decorator. What the function raises, it raises of the arguments as they were given.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.cache
        def program(*constants: str) -> Callable[..., Any]:
            return jax.jit(function, static_argnames=(*static, *constants), inline=_compat.INLINE)

        default = program(*numbers)

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            run = default
            for name in numbers:
                if name in kwargs and not is_number(kwargs[name]):
                    run = program(*(n for n in numbers if is_number(kwargs.get(n, 1))))
                    break
            try:
                return run(*map(_array, args), **{k: _array(x) for k, x in kwargs.items()})
            except (TypeError, ValueError):
                pass  # of an argument that no program takes, or raised by the function
            return function(*args, **kwargs)

        return call

    return decorate


def _array(x: Any) -> Any:
    """Returns the array that an object of another library stands for, anything else as it is."""
    return jnp.asarray(x) if hasattr(type(x), "__jax_array__") else x
