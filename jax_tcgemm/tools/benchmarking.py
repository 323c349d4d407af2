"""Measures kernel times of competing functions side by side.

Three effects distort GPU timings. This module avoids each:

- Temperature and power drift by several percent over seconds, so competitors alternate in short
  blocks instead of running one after the other.
- A problem that fits the L2 cache runs from it on the second call, so every sample goes over
  several argument sets.
- Launch overhead hides the kernel, so the time is that of the kernels alone, as CUPTI reports it.
  Wall time is the fallback; the result names the method.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jax_tcgemm.tools.chain import Chain, compile_chain, default_device

Method = Literal["cupti", "events", "wall"]

_WALL_SECONDS_PER_SAMPLE = 2e-3


@dataclasses.dataclass(frozen=True)
class Timing:
    """Times of one function.

    Attributes:
        seconds: one sample per repetition; each is the time of one call, averaged over the
            argument sets.
        method: ``"cupti"`` for kernel time on the GPU; ``"events"`` for time on the GPU including
            the gaps after kernels (``stopwatch``); ``"wall"`` for wall time of a jitted chain of
            calls, one per argument set, including launch gaps.
        kernels: the number of kernels of one call; ``None`` if they were not counted.
    """

    seconds: tuple[float, ...]
    method: Method
    kernels: float | None = None

    @property
    def median(self) -> float:
        """The median of the samples, in seconds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """The interquartile range divided by the median; the median is reliable if it is small."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / self.median


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
        reps: the minimum number of samples of each function.
        block: samples of one function before the next has its turn. The order reverses after each
            round.
        method: ``"cupti"`` or ``"wall"``; by default CUPTI if it works.

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
    chains = {name: compile_chain(f, argument_sets) for name, f in functions.items()}
    return time_chains(chains, reps=reps, block=block, method=method)


def time_chains(
    chains: Mapping[str, Chain],
    *,
    reps: int = 20,
    block: int = 4,
    seconds: float = 0.0,
    method: Method | None = None,
) -> dict[str, Timing]:
    """Times compiled chains against each other, like ``time_interleaved`` for functions.

    Args:
        chains: the competitors by name.
        reps: the minimum number of samples of each competitor.
        block: samples of one competitor before the next has its turn.
        seconds: the minimum duration for all competitors together. The GPU never idles meanwhile,
            so its clock settles at its power limit.
        method: ``"cupti"`` or ``"wall"``; by default CUPTI if it works.

    Returns:
        One ``Timing`` per name, with its samples in the order in which they were taken.

    Raises:
        RuntimeError: ``method="cupti"`` and CUPTI cannot be used here, or the record of
            ``one_by_one`` chains cannot be divided among their calls.
    """
    if method is None:
        method = "cupti" if cupti_works(default_device()) else "wall"
    if method == "cupti":
        try:
            return _one_cupti_session(chains, reps, block, seconds)
        except RuntimeError as error:
            if any(chain.one_by_one for chain in chains.values()):
                raise
            warnings.warn(f"one CUPTI session for each block, because {error}", stacklevel=2)
    sample = _cupti_samples if method == "cupti" else _wall_samples
    samples: dict[str, list[float]] = {name: [] for name in chains}
    for name in turns(list(chains), reps, block, seconds):
        calls = len(chains[name].argument_sets)
        samples[name] += [second / calls for second in sample(chains[name], block)]
    return {name: Timing(tuple(samples[name]), method) for name in chains}


def turns(names: list[str], reps: int, block: int, seconds: float = 0.0) -> Iterator[str]:
    """Yields the name of the next block, until each has ``reps`` samples and the time is over."""
    start = time.perf_counter()
    done = 0
    while done < reps or time.perf_counter() - start < seconds:
        yield from names
        names = names[::-1]
        done += block


@functools.cache
def cupti_works(device: Any) -> bool:
    """Returns true if CUPTI can measure kernel times on a device."""
    if device.platform != "gpu":
        return False
    try:
        _cupti_samples(compile_chain(jnp.negative, [(jnp.ones(8),)]), 1)
    except Exception:  # Whatever CUPTI or JAX's wrapper of it raises, wall time remains.
        return False
    return True


def _profiler() -> Any:
    try:
        from jax.experimental.mosaic.gpu import profiler
    except ImportError as error:
        raise RuntimeError(f"this JAX has no CUPTI timer: {error}") from error
    return profiler


def _cupti_samples(chain: Chain, count: int) -> list[float]:
    """Returns the kernel seconds of ``count`` runs of the chain."""
    measure = _profiler().measure(chain.compiled, iterations=count)
    _, milliseconds = measure(chain.argument_sets)
    if milliseconds is None:
        raise RuntimeError("CUPTI saw no kernel")
    if not isinstance(milliseconds, list):
        milliseconds = [milliseconds]
    return [ms * 1e-3 for ms in milliseconds]


@functools.cache
def _marker(device: Any) -> Callable[[], Any]:
    """Returns a compiled call that runs a kernel of a distinct kind on a device."""
    with jax.default_device(device):
        angle = jnp.ones(())
        compiled = jax.jit(jnp.arctan2).lower(angle, angle).compile()
        jax.block_until_ready(compiled(angle, angle))
    return functools.partial(compiled, angle, angle)


def _one_cupti_session(
    chains: Mapping[str, Chain], reps: int, block: int, seconds: float
) -> dict[str, Timing]:
    """Takes all samples in one CUPTI session, so that nothing interrupts the kernels.

    A marker kernel runs before each block and divides the session's record.

    Raises:
        RuntimeError: CUPTI gives no record, or the record cannot be divided.
    """
    try:
        extension = _profiler().mosaic_gpu_lib._mosaic_gpu_ext
        start, finish = extension._cupti_init, extension._cupti_get_timings
    except AttributeError as error:
        raise RuntimeError(f"this JAX's CUPTI timer is another: {error}") from error
    mark = _marker(default_device())
    order, running = [], []
    start()
    try:
        for name in turns(list(chains), reps, block, seconds):
            order.append(name)
            mark()
            for _ in range(block - 1):
                chains[name]()
            running.append(chains[name]())
            # Only the next block is queued while this one runs.
            if len(running) > 1:
                jax.block_until_ready(running.pop(0))
        jax.block_until_ready(running)
    finally:
        kernels = finish(False)
    samples = divide_kernels(kernels, order, block)
    timings = {}
    for name, chain in chains.items():
        calls = len(chain.argument_sets)
        times = tuple(sum(sample) * 1e-3 / calls for sample in samples[name])
        timings[name] = Timing(times, "cupti", len(samples[name][0]) / calls)
    return timings


def divide_kernels(
    kernels: Sequence[tuple[str, float]], order: Sequence[str], block: int
) -> dict[str, list[list[float]]]:
    """Divides the record of a session among the competitors' turns.

    Args:
        kernels: name and time of each kernel; the first is the marker, which runs before each turn.
        order: the name of the competitor of each turn.
        block: samples in a turn.

    Returns:
        The samples by name; each sample is a list of its kernels' times.

    Raises:
        RuntimeError: the kernels cannot be divided in this way.
    """
    turns: list[list[tuple[str, float]]] = []
    for kernel in kernels:
        if kernel[0] == kernels[0][0]:
            turns.append([])
        else:
            turns[-1].append(kernel)
    if len(turns) != len(order):
        raise RuntimeError(f"CUPTI saw {len(turns)} of {len(order)} turns")
    samples: dict[str, list[list[float]]] = {name: [] for name in order}
    for name, turn in zip(order, turns, strict=True):
        count = len(turn) // block
        parts = [turn[start : start + count] for start in range(0, len(turn), max(1, count))]
        if len(parts) != block or len({tuple(kernel for kernel, _ in part) for part in parts}) > 1:
            raise RuntimeError(f"the kernels of {name} are not {block} times the same")
        samples[name] += [[time for _, time in part] for part in parts]
    return samples


def _wall_samples(chain: Chain, count: int) -> list[float]:
    """Returns ``count`` wall times of the chain, each a mean over enough runs for a good timing."""
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
