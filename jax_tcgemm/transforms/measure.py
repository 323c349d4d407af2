"""How a product is computed fastest: its candidates by turns, beside XLA's own composition."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable

import jax

from jax_tcgemm import _compat
from jax_tcgemm.epilogue.spec import CompiledSpec
from jax_tcgemm.kernels.names import XLA
from jax_tcgemm.problem.log import log
from jax_tcgemm.tools.benchmarking import Timing
from jax_tcgemm.transforms.candidates import MOST
from jax_tcgemm.transforms.decision import CUBLAS, UNTUNED, decided, is_clear
from jax_tcgemm.transforms.numbers import Numbers
from jax_tcgemm.transforms.race import NEAR_LIMIT, Race
from jax_tcgemm.tuning import lookup
from jax_tcgemm.tuning.entry import Entry
from jax_tcgemm.tuning.lookup import Measured, Product
from jax_tcgemm.tuning.tunings import described

# Samples of a block, and of one competitor before the next has its turn. Where two blocks leave it
# unclear which competitor is faster, there are more, so many at most.
_FINAL_REPS, _BLOCK, _MOST_BLOCKS = 8, 2, 8
# Rows that are timed with less time left than ``_PATIENT_SECONDS``: of 1,800 recorded products the
# best of them takes 0.3 % longer than the best of all rows.
_FEW_ROWS = 6
# XLA's autotuning takes most of a measurement (0.75 of 1.1 s on 16 cores). With less time left than
# this it is left out: cuBLAS alone stands for XLA, whose autotuning finds nothing slower.
_PATIENT_SECONDS = 60.0
# The untuned choice is good enough then if it is as fast as cuBLAS and this near to what the GPU
# can do.
_NEAR_ENOUGH = 0.75

_NUMBERS = Numbers()


def measure(
    product: Product,
    numbers: Numbers | None = None,
    *,
    patience: float = math.inf,
    stop: threading.Event | None = None,
) -> Measured:
    """Times what may compute a product, by turns.

    Rows of the build are timed as they are. Where the epilogue or the type takes rows that NVRTC
    compiles, their relatives in the build are timed first (``candidates.relative``), and of the
    rows themselves two at most.

    Args:
        product: as lowering has it.
        numbers: what operands are made of; by default those of other measurements.
        patience: seconds that this and other measurements may still take. With few, fewer rows are
            timed, and none where the untuned choice is good; cuBLAS stands for XLA.
        stop: once set, the measurement ends where it is.

    Returns:
        The outcome. It is certain if two blocks of samples, taken one after the other, agree.

    Raises:
        MemoryError: the operands and results take more than a part of the free memory.
        InterruptedMeasurementError: ``stop`` was set.
    """
    begun = time.perf_counter()
    is_patient = patience >= _PATIENT_SECONDS
    most = MOST if is_patient else _FEW_ROWS
    race = Race(product, numbers or _NUMBERS, stop or threading.Event(), most)
    if is_patient:
        race.enter({UNTUNED: None} | {name: name for name in race.rows()})
        race.narrow_down()
        if race.asks_xla():
            race.enter({XLA: XLA})
    else:
        race.enter({UNTUNED: None, CUBLAS: XLA})
        if race.is_near(NEAR_LIMIT):
            race.leave(CUBLAS)
        elif not (race.is_as_fast_as(CUBLAS) and race.is_near(_NEAR_ENOUGH)):
            race.enter({name: name for name in race.rows()})
            race.narrow_down()
    blocks = _blocks(race)
    best, is_certain = decided(blocks)
    if best == CUBLAS:  # what XLA takes in its place may be slower
        race.leave(CUBLAS)
        race.enter({XLA: XLA})
        blocks = _blocks(race)
        best, is_certain = decided(blocks)
    times = {name: min(block[name].median for block in blocks) for name in blocks[0]}
    config = None if best == UNTUNED else best
    of_xla = times.get(XLA, times.get(CUBLAS))
    entry = Entry.measured(config, times[best], times[UNTUNED], of_xla)
    us = ", ".join(f"{name} {1e6 * seconds:.1f} us" for name, seconds in times.items())
    took = time.perf_counter() - begun
    log(f"tune: {described(product.problem)}: {best}; {us}; took {took:.2f} s")
    return Measured(entry, is_certain)


def _blocks(race: Race) -> list[dict[str, Timing]]:
    """Returns samples: of two blocks, or of more where these leave the choice unclear."""
    blocks: list[dict[str, Timing]] = []
    while len(blocks) < 2 or not (is_clear(blocks) or len(blocks) == _MOST_BLOCKS):
        blocks += [race.timed(_FINAL_REPS, _BLOCK) for _ in range(2)]
    return blocks


def measure_while_lowering(product: Product, patience: float) -> Measured | None:
    """Measures a product where a program is being traced.

    Args:
        product: as lowering has it.
        patience: as of ``measure``. With little, a product with a function is not measured: NVRTC
            would compile kernels only to time them, and the model's choice was as fast.
    """
    if patience < _PATIENT_SECONDS and isinstance(product.spec, CompiledSpec):
        return None
    return in_a_thread(functools.partial(measure, product, patience=patience))


def in_a_thread(function: Callable[..., Measured]) -> Measured:
    """Calls a function where nothing is traced, and no mesh or option is set by a context.

    Args:
        function: takes ``stop``, which is set if this thread is interrupted.
    """
    device = next(iter(_compat.initialized_cuda_devices()), None)
    stop = threading.Event()

    outcomes: list[Measured | BaseException] = []

    def run() -> None:
        try:
            with jax.default_device(device), jax.debug_nans(False), jax.debug_infs(False):
                outcomes.append(function(stop=stop))
        except BaseException as error:  # raised again where it is waited for
            outcomes.append(error)

    # Not an executor: one that is interrupted while it starts a thread does not wait for it.
    thread = threading.Thread(target=run)
    try:
        thread.start()
        thread.join()
    except BaseException:
        stop.set()
        raise
    finally:
        if thread.ident is not None:
            thread.join()
    (outcome,) = outcomes
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


lookup.measure = measure_while_lowering
