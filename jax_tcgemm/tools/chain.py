"""Calls that are timed: of one function, on operands that no cache holds together, compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

# Over twice the L2 cache of an H200 (50 MiB).
_CACHE_BYTES = 2 * 64 * 2**20


def argument_set_count(bytes_per_call: int, limit: int = 16) -> int:
    """Number of argument sets that no cache holds together.

    Args:
        bytes_per_call: bytes of one call's arguments and results.
        limit: at most so many.

    Returns:
        A number between 1 and ``limit``.
    """
    return max(1, min(limit, -(-_CACHE_BYTES // max(1, bytes_per_call))))


@dataclasses.dataclass(frozen=True)
class Chain:
    """One call of a function per argument set, one after the other, compiled.

    Attributes:
        compiled: takes the argument sets, returns the list of results; or, ``one_by_one``, takes
            one set and returns its result.
        argument_sets: tuples of arrays.
        one_by_one: whether each call is a program of its own.
        config: which row calls take whose configuration is ``names.MEASURED``, where ``stopwatch``
            times them; empty for others.
    """

    compiled: Callable[..., Any]
    argument_sets: list[tuple[Any, ...]]
    one_by_one: bool = False
    config: str = ""

    def __call__(self) -> list[Any]:
        if self.one_by_one:
            return [self.compiled(*arguments) for arguments in self.argument_sets]
        return self.compiled(self.argument_sets)


def compile_chain(
    function: Callable[..., Any],
    argument_sets: Sequence[tuple[Any, ...]],
    *,
    one_by_one: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Chain:
    """Compiles one call per argument set and runs it once.

    Args:
        function: of the arguments of a set.
        argument_sets: tuples of arrays.
        options: more ``compiler_options`` of ``jax.jit``.
        one_by_one: compile one call, which is run for one set after the other: sooner compiled,
            and as good for CUPTI. Wall times then are those of launches, where these take longer.
    """
    sets = [tuple(arguments) for arguments in argument_sets]

    def chain(sets):
        return [function(*arguments) for arguments in sets]

    compiled = (
        compile_call(function, sets[0], options)
        if one_by_one
        else compile_call(chain, (sets,), options)
    )
    made = Chain(compiled, sets, one_by_one)
    jax.block_until_ready(made())
    return made


def compile_call(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compiles a call of a function so that it can be timed.

    Args:
        function: of the arguments.
        arguments: arrays, or their types.
        options: more ``compiler_options`` of ``jax.jit``.
    """
    asked = dict(options or {})
    if default_device().platform == "gpu":
        # A CUDA graph may run independent calls at the same time; a stream does not.
        asked["xla_gpu_graph_min_graph_size"] = 2**30
    return jax.jit(function, compiler_options=asked or None).lower(*arguments).compile()


def default_device() -> Any:
    """Returns the ``jax.Device`` of new arrays; ``jax.default_device`` is respected."""
    return next(iter(jnp.zeros(()).devices()))
