"""Compiled calls for timing: one function on argument sets that together exceed every cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

# More than twice the L2 cache of an H200 (50 MiB).
_CACHE_BYTES = 2 * 64 * 2**20


def argument_set_count(bytes_per_call: int, limit: int = 16) -> int:
    """Returns how many argument sets together exceed every cache.

    Args:
        bytes_per_call: bytes of one call's arguments and results.
        limit: the maximum number of sets.

    Returns:
        A number between 1 and ``limit``.
    """
    return max(1, min(limit, -(-_CACHE_BYTES // max(1, bytes_per_call))))


@dataclasses.dataclass(frozen=True)
class Chain:
    """Compiled calls of a function, one after the other, one per argument set.

    Attributes:
        compiled: takes the argument sets and returns the list of results. With ``one_by_one``, it
            takes one set and returns its result.
        argument_sets: tuples of arrays.
        one_by_one: whether each call is a separate program.
        config: the row that ``stopwatch`` selects for calls with the configuration
            ``names.MEASURED``; empty for other calls.
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
        function: takes the arguments of a set.
        argument_sets: tuples of arrays.
        options: additional ``compiler_options`` of ``jax.jit``.
        one_by_one: compile a single call and run it for each set. This compiles sooner and is as
            good for CUPTI. Wall times then measure the launches if these take longer.
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
        function: takes the arguments.
        arguments: arrays, or their types.
        options: additional ``compiler_options`` of ``jax.jit``.
    """
    asked = dict(options or {})
    if default_device().platform == "gpu":
        # A CUDA graph may run independent calls concurrently; a stream does not.
        asked["xla_gpu_graph_min_graph_size"] = 2**30
    return jax.jit(function, compiler_options=asked or None).lower(*arguments).compile()


def default_device() -> Any:
    """Returns the ``jax.Device`` of new arrays; respects ``jax.default_device``."""
    return next(iter(jnp.zeros(()).devices()))
