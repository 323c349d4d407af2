"""The one timer: kernel times of competing functions, measured side by side.

Three things make GPU timings lie, and this module deals with each. Temperature and power drift by
several percent over seconds, so competitors alternate in short blocks instead of running one after
the other. A problem that fits the L2 cache runs from it on the second call, so every call goes over
several argument sets. Launch overhead hides the kernel, so the time is that of the kernels alone,
as CUPTI reports it; wall time is the fallback, and the result says which it is.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

Method = Literal["cupti", "wall"]

# Twice the L2 cache of the largest GPU to date that runs these kernels.
_CACHE_BYTES = 2 * 64 * 2**20
_WALL_SECONDS_PER_SAMPLE = 2e-3


@dataclasses.dataclass(frozen=True)
class Timing:
    """Times of one function.

    Attributes:
        seconds: one sample per repetition; each is the time of one call, averaged over the
            argument sets.
        method: ``"cupti"`` for kernel time on the GPU, ``"wall"`` for wall time of a jitted chain
            of calls, one per argument set, launch gaps included.
    """

    seconds: tuple[float, ...]
    method: Method

    @property
    def median(self) -> float:
        """Median of the samples, in seconds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Interquartile range divided by the median: how far to trust the median."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / self.median


def argument_set_count(bytes_per_call: int, limit: int = 16) -> int:
    """Number of argument sets that no cache holds together.

    Args:
        bytes_per_call: bytes of one call's arguments and results.
        limit: at most so many.

    Returns:
        A number between 1 and ``limit``.
    """
    return max(1, min(limit, -(-_CACHE_BYTES // max(1, bytes_per_call))))


def time_interleaved(
    functions: Mapping[str, Callable[..., Any]],
    argument_sets: Sequence[tuple[Any, ...]],
    *,
    reps: int = 20,
    block: int = 4,
    method: Method | None = None,
) -> dict[str, Timing]:
    """Times functions of the same arguments against each other.

    Args:
        functions: the competitors by name; each is called as ``function(*arguments)`` under
            ``jax.jit``.
        argument_sets: tuples of arrays; a sample is one pass over all of them.
        reps: samples of each function, at least.
        block: samples of one function before the next has its turn. The order turns round from
            block to block.
        method: ``"cupti"`` or ``"wall"``; by default CUPTI where it works.

    Returns:
        One ``Timing`` per name, all by the same method.

    Raises:
        RuntimeError: ``method="cupti"`` and CUPTI cannot be used here.
        ValueError: no functions, no argument sets, or ``reps`` or ``block`` below 1.
    """
    if not functions or not argument_sets:
        raise ValueError("time_interleaved needs at least one function and one argument set")
    if reps < 1 or block < 1:
        raise ValueError(f"reps={reps} and block={block} must be at least 1")
    argument_sets = [tuple(arguments) for arguments in argument_sets]
    chains = {name: _compile_chain(f, argument_sets) for name, f in functions.items()}
    if method is None:
        method = "cupti" if _cupti_works(next(iter(chains.values()))) else "wall"
    sample = _cupti_samples if method == "cupti" else _wall_samples

    samples: dict[str, list[float]] = {name: [] for name in functions}
    order = list(functions)
    while len(samples[order[0]]) < reps:
        for name in order:
            seconds = sample(chains[name], block)
            samples[name] += [second / len(argument_sets) for second in seconds]
        order.reverse()
    return {name: Timing(tuple(samples[name]), method) for name in functions}


Chain = Callable[[], Any]


def _compile_chain(function: Callable[..., Any], argument_sets: list[tuple[Any, ...]]) -> Chain:
    """Compiles one call per argument set, one after the other, and runs it once."""

    def chain(sets):
        return [function(*arguments) for arguments in sets]

    options = {}
    if default_device().platform == "gpu":
        # A CUDA graph may run independent calls at the same time; a stream does not.
        options["compiler_options"] = {"xla_gpu_graph_min_graph_size": 2**30}
    compiled = jax.jit(chain, **options).lower(argument_sets).compile()
    jax.block_until_ready(compiled(argument_sets))
    return functools.partial(compiled, argument_sets)


def default_device() -> Any:
    """Returns the ``jax.Device`` of new arrays; ``jax.default_device`` is respected."""
    return next(iter(jnp.zeros(()).devices()))


def _cupti_works(chain: Chain) -> bool:
    if default_device().platform != "gpu":
        return False
    try:
        _cupti_samples(chain, 1)
    except Exception:  # Whatever CUPTI or JAX's wrapper of it raises, wall time remains.
        return False
    return True


def _cupti_samples(chain: Chain, count: int) -> list[float]:
    """Kernel seconds of ``count`` runs of the chain."""
    try:
        from jax.experimental.mosaic.gpu import profiler
    except ImportError as error:
        raise RuntimeError(f"this JAX has no CUPTI timer: {error}") from error
    assert isinstance(chain, functools.partial)
    _, milliseconds = profiler.measure(chain.func, iterations=count)(*chain.args)
    if milliseconds is None:
        raise RuntimeError("CUPTI saw no kernel")
    if not isinstance(milliseconds, list):
        milliseconds = [milliseconds]
    return [ms * 1e-3 for ms in milliseconds]


def _wall_samples(chain: Chain, count: int) -> list[float]:
    """Wall seconds of ``count`` runs of the chain, each the mean of enough runs to time well."""
    start = time.perf_counter()
    jax.block_until_ready(chain())
    once = time.perf_counter() - start
    inner = max(1, round(_WALL_SECONDS_PER_SAMPLE / max(once, 1e-9)))
    samples = []
    for _ in range(count):
        start = time.perf_counter()
        for _ in range(inner):
            results = chain()
        jax.block_until_ready(results)
        samples.append((time.perf_counter() - start) / inner)
    return samples
