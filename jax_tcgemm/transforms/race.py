"""Compiles the competitors for a product and times them in turns on the same operands."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend.core import Primitive

from jax_tcgemm import _core
from jax_tcgemm.kernels.names import MEASURED, XLA, find
from jax_tcgemm.lowering import devices, fallback, packed_problem
from jax_tcgemm.lowering.gemm import shares_program
from jax_tcgemm.primitives.gemm import gemm_p, ragged_contraction_p, ragged_dot_p
from jax_tcgemm.primitives.jit_epilogue import compiled_p, compiled_ragged_p
from jax_tcgemm.primitives.packed import packed_p
from jax_tcgemm.primitives.packed_function import packed_function_p
from jax_tcgemm.primitives.packed_ragged import packed_ragged_p
from jax_tcgemm.problem.log import log
from jax_tcgemm.tools import stopwatch
from jax_tcgemm.tools.benchmarking import Timing, time_chains
from jax_tcgemm.tools.chain import Chain, argument_set_count, compile_call, default_device
from jax_tcgemm.transforms.candidates import (
    MOST,
    built_candidates,
    candidates,
    relative,
    rows_of_relative,
)
from jax_tcgemm.transforms.decision import CUBLAS, UNTUNED, is_untuned
from jax_tcgemm.transforms.numbers import Numbers, operand_sets, size_of, unread_size
from jax_tcgemm.transforms.roofline import least_seconds
from jax_tcgemm.tuning.lookup import Product
from jax_tcgemm.tuning.tunings import untuned

_PRIMITIVES: dict[str, Primitive] = {
    "compiled": compiled_p,
    "compiled_ragged": compiled_ragged_p,
    "gemm": gemm_p,
    packed_problem.PLAIN: packed_p,
    packed_problem.FUNCTION: packed_function_p,
    packed_problem.RAGGED: packed_ragged_p,
    "ragged_dot": ragged_dot_p,
    "ragged_contraction": ragged_contraction_p,
}

# Compiler options of XLA's composition: with autotuning, or with cuBLAS only.
_OF_XLA = {XLA: {}, CUBLAS: {"xla_gpu_enable_triton_gemm": False}}

# Rounds that eliminate candidates: samples of each, the slowest time that stays (as a multiple of
# the fastest), and how many stay.
_ROUNDS = ((4, 1.25, 5), (8, 1.06, 3))
# Samples of each competitor for a first estimate of its time.
_FIRST_REPS = 8
# NVRTC compiles at most this many kernels for one product, in addition to the untuned choice.
_MOST_COMPILED = 2
# The share of the free memory that the operands and results may use.
_MEMORY_SHARE = 0.05

# A competitor counts as equally fast if its time is at most this multiple of the other's.
_AS_FAST = 1.02
# XLA is not timed if the fastest competitor takes at most the time of a launch, or if the GPU's
# limit is at least the share ``NEAR_LIMIT`` of that competitor's time.
_LEAST_ASKED_SECONDS = 2e-6
NEAR_LIMIT = 0.95

# The build's timed rows for each plain product, device kind and limit, the fastest first.
_FASTEST: dict[tuple[Any, ...], list[str]] = {}


class InterruptedMeasurementError(Exception):
    """The caller no longer waits for the measurement."""


class Race:
    """Compiled competitors for a product, which share the same operands.

    Args:
        product: the product, as the lowering describes it.
        numbers: the source of the operands' elements.
        stop: ends the race once it is set.
        most: how many rows are timed at most.
    """

    def __init__(
        self, product: Product, numbers: Numbers, stop: threading.Event, most: int = MOST
    ) -> None:
        self._most = most
        self._product = product
        self._numbers = numbers
        self._stop = stop
        self._device = default_device()
        self._properties = _core.device_properties(self._device.local_hardware_id or 0)
        self._sets = _begin(self._operands, _set_count(product, self._device))
        self._chains: dict[str, Chain] = {}
        self._least: dict[str, float] = {}

    @property
    def _is_packed(self) -> bool:
        return self._product.primitive in packed_problem.PRIMITIVES

    @property
    def has_rival(self) -> bool:
        """True if cuBLAS may be faster. XLA has to unpack packed weights first."""
        return not self._is_packed

    def _operands(self, count: int) -> list[tuple[jax.Array, ...]]:
        with jax.default_device(self._device):
            return operand_sets(self._product, self._numbers, count)

    def rows(self) -> list[str]:
        """Returns the names of the rows that are worth timing."""
        if self._is_packed:  # the race times the first one, the untuned choice, anyway
            return packed_problem.candidates(self._product.problem)[1 : self._most]
        ranked = candidates(self._product, self._properties, self._most)
        built = built_candidates(self._product, self._properties, self._most)
        plain = relative(self._product)
        is_half = plain is not None and plain.types[0].dtype != self._product.types[0].dtype
        if not ranked or (ranked[0] in built and not is_half):
            return built
        if plain is None:  # the first row of each layout of the weights
            return list(dict.fromkeys([*ranked[:_MOST_COMPILED], ranked[len(ranked) // 2]]))
        fastest = self._fastest_relatives(plain)
        possible = rows_of_relative(self._product, fastest, self._properties)
        known = set(built)
        # The race times the untuned choice anyway. It may be a function, which no row's name means.
        # On GPUs other than Hopper's it is XLA.
        is_timed = is_untuned(ranked[0]) and devices.other_than(devices.HOPPER) is None
        if is_timed and self._product.primitive != "gemm":
            known.add(ranked[0])
        others = dict.fromkeys(name for name in (*possible, *ranked) if name not in known)
        return [*built, *list(others)[:_MOST_COMPILED]]

    def _fastest_relatives(self, plain: Product) -> list[str]:
        key = plain.primitive, plain.spec, plain.types, self._device.device_kind, self._most
        found = _FASTEST.get(key)
        if found is None:
            race = Race(plain, self._numbers, self._stop, self._most)
            built = built_candidates(plain, self._properties, self._most)
            race.enter({name: name for name in built})
            found = race.narrow_down()
            if found:
                _FASTEST[key] = found
        return found

    def enter(self, configs: Mapping[str, str | None]) -> None:
        """Compiles competitors, several at a time.

        A competitor that fails to compile is left out. Exception: if the untuned choice fails, this
        method raises the error.

        Args:
            configs: by name of the competitor, the ``config=`` that it uses.
        """
        self._check()

        shared = {
            name: config
            for name, config in configs.items()
            if config is not None and config != XLA and self._shares_program(config)
        }
        programs = {name: config for name, config in configs.items() if name not in shared}
        if shared:
            programs[MEASURED] = MEASURED

        types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self._product.types]

        def chain(item: tuple[str, str | None]) -> Chain | None:
            name, config = item
            call = functools.partial(_apply, self._product, config)
            options = _OF_XLA.get(name)
            try:
                with untuned(), fallback.lenient(), jax.default_device(self._device):
                    compiled = compile_call(call, types, options)
                    made = Chain(compiled, self._sets.result(), one_by_one=True)
                    jax.block_until_ready(made())
                    return made
            except Exception as error:  # One of the others is chosen.
                if name == UNTUNED:
                    raise
                log(f"tune: {name} left out: {type(error).__name__}: {error}")
                return None

        with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            compiled = dict(zip(programs, pool.map(chain, programs.items()), strict=True))
        program = compiled.pop(MEASURED, None)
        if program is not None:
            for name, config in shared.items():
                compiled[name] = self._loaded(dataclasses.replace(program, config=config))
        made = ((name, compiled.get(name)) for name in configs)
        self._chains |= {name: each for name, each in made if each is not None}

    def _shares_program(self, config: str) -> bool:
        """Returns true if a row can run in the one program that many rows share."""
        product = self._product
        if product.primitive == "gemm":
            return shares_program(product.types, product.spec, config)
        row = find(config)
        return row is not None and product.spec.function is None and row.copies_whole_chunks

    def _loaded(self, chain: Chain) -> Chain | None:
        """Runs a row of the shared program once and returns it; ``None`` if it fails."""
        try:
            if self._device.platform == "gpu":
                stopwatch.run_once(chain, self._device)
        except Exception as error:  # One of the others is chosen.
            log(f"tune: {chain.config} left out: {type(error).__name__}: {error}")
            return None
        return chain

    def narrow_down(self) -> list[str]:
        """Keeps the few fastest rows and returns them, the fastest first.

        Competitors that are not rows stay in the race.
        """
        others = {UNTUNED, *_OF_XLA}
        rows = [name for name in self._chains if name not in others]
        for reps, factor, most in _ROUNDS:
            if len(self._chains) < 2:
                break
            timings = self.timed(reps, 1)
            self._least = {name: min(timing.seconds) for name, timing in timings.items()}
            rows = sorted((x for x in timings if x not in others), key=self._least.__getitem__)
            limit = factor * min(self._least[x] for x in timings if x not in _OF_XLA)
            rows = [name for name in rows if self._least[name] <= limit][:most]
            self._chains = {x: y for x, y in self._chains.items() if x in others or x in rows}
        return rows

    def is_near(self, share: float) -> bool:
        """Returns true if the GPU's limit is at least this share of the untuned choice's time."""
        return share * self._time_of(UNTUNED) <= self._limit()

    def is_far(self, share: float) -> bool:
        """Returns true if the GPU's known limit is less than this share of the same time."""
        seconds = self._time_of(UNTUNED)
        return seconds > _LEAST_ASKED_SECONDS and 0 < self._limit() < share * seconds

    def is_as_fast_as(self, other: str) -> bool:
        """Returns true if the untuned choice is at least as fast as another competitor."""
        return self._time_of(UNTUNED) <= _AS_FAST * self._time_of(other)

    def _time_of(self, name: str) -> float:
        """Returns the shortest time of a competitor; 0 if it could not be compiled."""
        if self._chains.keys() - self._least.keys():
            timings = self.timed(_FIRST_REPS, 1)
            self._least = {each: min(timing.seconds) for each, timing in timings.items()}
        return self._least.get(name, 0.0)

    def asks_xla(self) -> bool:
        """Returns true if XLA's composition may be the fastest."""
        best = min((self._least[x] for x in self._chains if x in self._least), default=0.0)
        return not best or (best > _LEAST_ASKED_SECONDS and NEAR_LIMIT * best > self._limit())

    def _limit(self) -> float:
        size = _bytes(self._product) - unread_size(self._product)
        return least_seconds(self._product, size, self._properties)

    def leave(self, name: str) -> None:
        """Removes a competitor."""
        self._chains.pop(name, None)

    def timed(self, reps: int, block: int) -> dict[str, Timing]:
        """Returns samples of all competitors, taken in turns."""
        self._check()
        if self._device.platform == "gpu":
            return stopwatch.time_chains(self._chains, self._device, reps=reps, block=block)
        return time_chains(self._chains, reps=reps, block=block)

    def _check(self) -> None:
        if self._stop.is_set():
            raise InterruptedMeasurementError


def _apply(product: Product, config: str | None, *operands: jax.Array) -> Any:
    spec = product.spec.with_config(config)
    if product.primitive == "gemm":
        spec = spec.replace(overwrite_c=False)  # c is not donated here, so XLA would copy it
    return _PRIMITIVES[product.primitive].bind(*operands, spec=spec)


def _begin(function: Callable[..., Any], *arguments: Any) -> concurrent.futures.Future[Any]:
    """Calls a function in a thread and returns a future of its result."""
    pool = concurrent.futures.ThreadPoolExecutor(1)
    try:
        return pool.submit(function, *arguments)
    finally:
        pool.shutdown(wait=False)


def _bytes(product: Product) -> int:
    """Returns the bytes of the operands and results."""
    results = jax.eval_shape(functools.partial(_apply, product, XLA), *product.types)
    return size_of(product.types) + size_of(jax.tree.leaves(results))


def _set_count(product: Product, device: Any) -> int:
    """Returns how many sets of operands to make.

    Together the sets exceed every cache, unless the GPU's memory allows only fewer.

    Raises:
        MemoryError: not even one set fits.
    """
    size = _bytes(product)
    count = argument_set_count(size)
    statistics = device.memory_stats() or {}
    if "bytes_limit" not in statistics:
        return count
    free = statistics["bytes_limit"] - statistics["bytes_in_use"]
    fitting = int(_MEMORY_SHARE * free) // size
    if fitting < 1:
        share = f"{_MEMORY_SHARE:.0%} of the {free} that are free"
        raise MemoryError(f"{size} bytes of operands and results are more than {share}")
    return min(count, fitting)
