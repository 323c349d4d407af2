"""Finds the fastest way to compute a product: times candidates and XLA's composition in turns."""

from __future__ import annotations

import functools
import json
import math
import threading
import time
from collections.abc import Callable

import jax

from jax_tcgemm import _compat
from jax_tcgemm.kernels.names import XLA
from jax_tcgemm.lowering import devices
from jax_tcgemm.lowering.fallback.functions import FEW_ROWS
from jax_tcgemm.lowering.named_function import MOST_RESULTS
from jax_tcgemm.problem.log import log
from jax_tcgemm.tools.benchmarking import Timing
from jax_tcgemm.transforms.candidates import MOST, is_batch_of_few_rows
from jax_tcgemm.transforms.decision import CUBLAS, UNTUNED, Lead, decided, is_clear
from jax_tcgemm.transforms.numbers import Numbers
from jax_tcgemm.transforms.race import NEAR_LIMIT, Race
from jax_tcgemm.tuning import lookup
from jax_tcgemm.tuning.entry import Entry
from jax_tcgemm.tuning.lookup import Measured, Product
from jax_tcgemm.tuning.tunings import described

# Samples of each competitor in a block, samples of one competitor in a turn, and the maximum number
# of blocks. There are more than two blocks only if two leave the fastest competitor unclear.
_FINAL_REPS, _BLOCK, _MOST_BLOCKS = 8, 2, 8
# With less time left than ``_PATIENT_SECONDS``, only this many rows are timed. On 1,800 recorded
# products, the best of them takes 0.3 % longer than the best of all rows.
_FEW_ROWS = 6
# XLA's autotuning takes most of a measurement (0.75 of 1.1 s on 16 cores). With less time left than
# this, the measurement times cuBLAS first, and XLA's own choice only where it may be the fastest.
_PATIENT_SECONDS = 60.0
# With less time left, the untuned choice is good enough if it is as fast as cuBLAS and the GPU's
# limit is at least this share of its time.
_NEAR_ENOUGH = 0.75
# XLA's own choice may be the fastest although cuBLAS is not if the GPU's limit is less than this
# share of the untuned choice's time, and, with a function, if there are at most this many results.
# It was for 20 of 160 products with 65 to 1100 rows (lab/choice.md).
_FAR, _MEDIUM_RESULTS = 0.65, 3_500_000
# In programs, XLA's products of many rows were as fast as kernels that alone took 4 % and 1 to 3 us
# less time (lab/fusion.md).
_LEAD_OF_MANY_ROWS = Lead(share=0.05, seconds=2e-6)
# From this ``k`` on, the products of the next tile hide a function of a hundred instructions.
_HIDING = 4096

_NUMBERS = Numbers()


def measure(
    product: Product,
    numbers: Numbers | None = None,
    *,
    patience: float = math.inf,
    stop: threading.Event | None = None,
) -> Measured:
    """Times the ways to compute a product, in turns.

    If the build contains the rows, they are timed directly. If the epilogue or the type needs rows
    that NVRTC compiles, their relatives in the build are timed first (``candidates.relative``), and
    then at most two of the rows themselves. With little patience, a function is only compared with
    XLA.

    Args:
        product: the product, as the lowering describes it.
        numbers: the source of the operands' elements; by default shared by all measurements.
        patience: seconds that this and other measurements may still take. If few are left, fewer
            rows are timed (none if the untuned choice is good), and cuBLAS stands for XLA in most
            measurements.
        stop: once set, the measurement ends.

    Returns:
        The outcome. It is certain if both halves of the sample blocks, taken alternately, agree.

    Raises:
        MemoryError: the operands and results need more than their share of the free memory.
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
        race.enter({UNTUNED: None} | ({CUBLAS: XLA} if race.has_rival else {}))
        if race.is_near(NEAR_LIMIT):
            race.leave(CUBLAS)
        elif _takes_rows(product) and not (
            race.is_as_fast_as(CUBLAS) and race.is_near(_NEAR_ENOUGH)
        ):
            race.enter({name: name for name in race.rows()})
            race.narrow_down()
    lead = _LEAD_OF_MANY_ROWS if _has_results(product) else Lead()
    blocks = _blocks(race, lead)
    best, is_certain = decided(blocks, lead)
    if not is_patient and _asks_xla(product, race, best):
        race.leave(CUBLAS)
        race.enter({XLA: XLA})
        blocks = _blocks(race, lead)
        best, is_certain = decided(blocks, lead)
    times = {name: min(block[name].median for block in blocks) for name in blocks[0]}
    config = {UNTUNED: None, CUBLAS: XLA}.get(best, best)
    of_xla = times.get(XLA, times.get(CUBLAS))
    entry = Entry.measured(config, times[best], times[UNTUNED], of_xla)
    us = ", ".join(f"{name} {1e6 * seconds:.1f} us" for name, seconds in times.items())
    took = time.perf_counter() - begun
    log(f"tune: {described(product.problem)}: {config or UNTUNED}; {us}; took {took:.2f} s")
    return Measured(entry, is_certain)


def _asks_xla(product: Product, race: Race, best: str) -> bool:
    """Checks if XLA's own choice is timed, too: it may be faster than cuBLAS, or slower."""
    if best == CUBLAS:  # for many rows, the program takes XLA's choice without being timed
        return not _has_results(product)
    most_results = math.inf if product.spec.function is None else _MEDIUM_RESULTS
    return _has_results(product, most_results) and race.is_far(_FAR)


def _takes_rows(product: Product) -> bool:
    """Checks if rows are timed with little patience: not for functions, except on other GPUs.

    The untuned choice for a function is XLA on GPUs other than Hopper's.
    """
    return product.spec.function is None or devices.other_than(devices.HOPPER) is not None


def _is_timed(product: Product) -> bool:
    """Checks if the kernel of a function is compared with XLA while a program is lowered.

    It is if XLA was faster in some cases: for 65 rows and columns, with few tiles an SM or with a
    short ``k``, which does not hide the function. NVRTC compiles no other kernels only to time
    them. Nobody has timed functions on GPUs other than Hopper's.
    """
    is_short = json.loads(product.problem)["k"] < _HIDING
    is_known = devices.other_than(devices.HOPPER) is None and not is_short
    most = MOST_RESULTS if is_known else math.inf
    return _has_results(product, most) and not product.spec.scaled


def _has_results(product: Product, most: float = math.inf) -> bool:
    """Checks for one dense product of 65 or more rows and columns and ``most`` or less results."""
    problem = json.loads(product.problem)
    m, n = problem["m"], problem["n"]
    is_one = product.primitive in ("gemm", "compiled") and not problem["batch"]
    return is_one and min(m, n) > FEW_ROWS and m * n <= most


def _blocks(race: Race, lead: Lead) -> list[dict[str, Timing]]:
    """Returns two blocks of samples, or more if these leave the choice unclear."""
    blocks: list[dict[str, Timing]] = []
    while len(blocks) < 2 or not (is_clear(blocks, lead) or len(blocks) == _MOST_BLOCKS):
        blocks += [race.timed(_FINAL_REPS, _BLOCK) for _ in range(2)]
    return blocks


def measure_while_lowering(product: Product, patience: float) -> Measured | None:
    """Measures a product while a program is being traced.

    Args:
        product: the product, as the lowering describes it.
        patience: as for ``measure``. If little is left, two kinds of products are not measured:
            most functions (``_is_timed``), and batches of few rows. For those the model's choice
            was at most a tenth slower than the fastest kernel, and XLA's product slower in most
            cases (lab/fusion.md).
    """
    is_function = product.spec.function is not None
    is_left_out = not _is_timed(product) if is_function else is_batch_of_few_rows(product)
    if patience < _PATIENT_SECONDS and is_left_out:
        return None
    return in_a_thread(functools.partial(measure, product, patience=patience))


def in_a_thread(function: Callable[..., Measured]) -> Measured:
    """Calls a function in a new thread, without the caller's trace, mesh and options.

    Args:
        function: takes ``stop``, which is set if the calling thread is interrupted.
    """
    device = next(iter(_compat.initialized_cuda_devices()), None)
    stop = threading.Event()

    outcomes: list[Measured | BaseException] = []

    def run() -> None:
        try:
            with jax.default_device(device), jax.debug_nans(False), jax.debug_infs(False):
                outcomes.append(function(stop=stop))
        except BaseException as error:  # the calling thread raises it again
            outcomes.append(error)

    # An executor that is interrupted while it starts a thread would not wait for that thread.
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
